"""Defines the records that pass between packages. They are frozen, and hold no live objects but policy functions."""
