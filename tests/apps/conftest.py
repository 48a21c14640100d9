"""Worlds that several tests of this folder share can be imported by their own name."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).parent
if str(FOLDER) not in sys.path:
    sys.path.insert(0, str(FOLDER))
