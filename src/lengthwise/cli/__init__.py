"""The command line: one file per command, each of which parses, calls and prints."""

from lengthwise.cli.program import main

__all__ = ["main"]
