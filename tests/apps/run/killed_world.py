"""Processes that tests kill: coordinators of their own, and whether what they started is gone with them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = Path(__file__).parent / "coordinator_process.py"


def is_gone(pid):
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True


def gone(pids, max_s=30.0):
    end = time.monotonic() + max_s
    while not all(map(is_gone, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return all(map(is_gone, pids))


def started(tmp_path, when, *options):
    """A coordinator's process once a progress row satisfies ``when``, and the pids of its engines."""
    message = tmp_path / "said.txt"
    with message.open("wb") as file:
        process = subprocess.Popen([sys.executable, str(SCRIPT), str(tmp_path), *options], stdout=file)
    seen = 0
    while process.poll() is None:
        lines = message.read_text().split("\n")[:-1]
        for row in map(json.loads, lines[seen:]):
            if when(row):
                return process, row["pids"]
        seen = len(lines)
        time.sleep(0.01)
    raise AssertionError(f"it ended before: {process.wait()}")
