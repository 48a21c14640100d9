"""What each command does: one use case per file, imported lazily, without argument parsing or formatting."""
