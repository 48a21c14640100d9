"""Law 1 in one more lane: with every array index checked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LAW_1 = Path(__file__).parents[1] / "laws" / "test_kernel_agrees.py"


@pytest.mark.slow
def test_with_indices_checked(tmp_path):
    """A kernel of its own in a folder of its own: machine code of another lane would check nothing."""
    env = {"NUMBA_BOUNDSCHECK": "1", "LENGTHWISE_EXAMPLES": "50", "LENGTHWISE_CACHE_DIR": str(tmp_path)}
    program = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "faulthandler_timeout=900",
        str(LAW_1),
    ]
    result = subprocess.run(program, env=os.environ | env, capture_output=True, text=True, timeout=900, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert list(tmp_path.rglob("*kernel.run*.code")), "the kernel was compiled in this lane"
