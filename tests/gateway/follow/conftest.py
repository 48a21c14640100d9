"""The small worlds of this folder, and of the scheduler's, can be imported by their own name."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), *(str(FOLDER.parent / name) for name in ("core", "relay", "."))]
