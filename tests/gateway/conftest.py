"""Modules of this folder and of the relay's tests can be imported by the other folders' tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "relay")]
