"""What each command does: one use case a file, imported lazily; no argument parsing and no formatting."""
