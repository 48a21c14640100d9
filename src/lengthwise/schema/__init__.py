"""Nouns that pass between the rooms; frozen records of columns, never live objects."""
