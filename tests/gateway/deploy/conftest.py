"""The manifests can be imported by the tests here, and are rendered once."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
