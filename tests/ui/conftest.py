"""A running planner, and a browser."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("", "gateway/admin", "gateway/observe")]

from browser import driver  # noqa: E402 - a fixture; its folder is on the path now

from lengthwise import engine  # noqa: E402
from lengthwise.ui import server  # noqa: E402
from lengthwise.ui.page import Page  # noqa: E402

__all__ = ["driver"]


@pytest.fixture(scope="session")
def served():
    """A context that serves pages in this process."""
    return _served


@contextlib.contextmanager
def _served(*pages: Page) -> Iterator[str]:
    """The address of a server of these pages in this process."""
    import uvicorn

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        running = uvicorn.Server(uvicorn.Config(server.app(pages=pages), log_level="warning"))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            running.should_exit = True
            thread.join(60)
        assert not thread.is_alive()


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
