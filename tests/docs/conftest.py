"""Makes the helpers of this folder importable, and the browser of tests/browser.py."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from browser import driver  # noqa: E402 - a fixture; its folder is on the path now

__all__ = ["driver"]
