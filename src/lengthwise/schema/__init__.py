"""Records that pass between the packages: frozen columns, never live objects."""
