"""Stores of tenants: an SQLite file, or a real PostgreSQL server."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "faults"), str(Path(__file__).parents[2] / "apps" / "ledger")]
