"""The command line: one file a command; each parses, calls and prints."""

from lengthwise.cli.program import main

__all__ = ["main"]
