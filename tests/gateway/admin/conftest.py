"""A browser, and gateways whose state is made up in a clock of their own."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from browser import driver  # noqa: E402 - a fixture; its folder is on the path now

__all__ = ["driver"]
