"""``python -m lengthwise.cli``: the same as the command ``lengthwise``."""

from lengthwise.cli import main

main()
