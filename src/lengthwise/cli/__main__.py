"""``python -m lengthwise.cli``: the same as the command ``lengthwise``."""

import sys

from lengthwise.cli import main

sys.exit(main())
