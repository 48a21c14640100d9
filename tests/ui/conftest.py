"""A running planner, and a browser."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[1])]

from browser import driver  # noqa: E402 - a fixture; its folder is on the path now

from lengthwise import engine  # noqa: E402

__all__ = ["driver"]


@pytest.fixture(scope="session")
def planner() -> Iterator[str]:
    """The address of a planner that runs in a process of its own."""
    engine.warm_up()
    command = [sys.executable, "-m", "lengthwise.cli", "ui", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+/", line)
        assert found, line
        yield found[0]
        process.terminate()
