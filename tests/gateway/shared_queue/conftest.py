"""The worlds of the scheduler and of gateways' processes can be imported by their own names."""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(_TESTS / "gateway" / one) for one in ("shared_queue", "core", "faults", "relay")]
sys.path.append(str(_TESTS / "apps" / "ledger"))
