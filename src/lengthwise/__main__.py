"""``python -m lengthwise``: the same as the command ``lengthwise``."""

from lengthwise.cli import __main__  # noqa: F401 - runs the command
