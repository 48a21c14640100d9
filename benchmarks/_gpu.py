"""The campaign of gpu_campaign.py where torch finds a CUDA GPU: its rows; elsewhere a reason."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _gpu_plan import UnfitError, cuda

CAMPAIGN = Path(__file__).with_name("gpu_campaign.py")
RESULTS = Path(__file__).parent / "results" / "gpu"


def figures(shared: Path, fast: bool) -> dict[str, Any]:
    """Rows by name. Profile and records go to results/gpu; ``quick``: of a small model, kept nowhere.

    Raises:
        FileNotFoundError: This machine has no torch or no CUDA GPU, or the campaign could not be done; it says which.
    """
    del shared
    try:
        cuda()
    except UnfitError as error:
        raise FileNotFoundError(str(error)) from error
    with tempfile.TemporaryDirectory() as scratch:
        folder = scratch if fast else str(RESULTS)
        asked = [sys.executable, str(CAMPAIGN), "--out", folder, *(["--tiny"] if fast else [])]
        done = subprocess.run(asked, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        print(done.stderr, end="", file=sys.stderr)
        kept = Path(folder) / "rows.json"
        if not kept.exists():
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise FileNotFoundError(f"the campaign ended without rows ({done.returncode}): {last}")
        rows = map(json.loads, kept.read_text("utf-8").splitlines())
        return {row.pop("name"): {k: v for k, v in row.items() if v is not None} for row in rows}
