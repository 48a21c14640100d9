"""A real engine as a process of this machine: started, waited for, and ended with all its processes."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lengthwise.backend import _process_keeper
from lengthwise.schema.errors import EngineError, InputError, OutputError

HEALTH = ("/health", "/v1/models")
PROBE_S = 5.0
READY_S = 300.0
GRACE_S = 20.0
LAST_LINES = 25
_POLL_INTERVAL_S = 0.2
_CHILDREN_S = 2.0  # how long the children of an ended engine may outlive it before they are killed
_PORTS = range(15_000, 32_768)  # below the ephemeral ports (Linux from 32,768 on, others from 49,152)
_next_port = itertools.count(os.getpid() * 101)


def is_taken(host: str, port: int) -> bool:
    """Return whether a program listens at the port."""
    with socket.socket() as listener, contextlib.suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        return False
    return True


def is_ready(host: str, port: int) -> bool:
    """Return whether one of the health paths answers with 200."""
    for path in HEALTH:
        with (
            contextlib.closing(http.client.HTTPConnection(host, port, timeout=PROBE_S)) as connection,
            contextlib.suppress(OSError, http.client.HTTPException),
        ):
            connection.request("GET", path)
            if connection.getresponse().status == http.HTTPStatus.OK:
                return True
    return False


@dataclass(frozen=True)
class LocalEngine:
    """A ready engine."""

    url: str  # without a path
    process: subprocess.Popen[bytes]  # leads an own group
    log_path: Path
    ready_after_s: float  # since the start of the process

    @property
    def is_alive(self) -> bool:
        """Return whether it runs."""
        return self.process.poll() is None

    def check(self) -> None:
        """Raise EngineError, with the last lines of its log, if it has ended."""
        if not self.is_alive:
            raise EngineError(_exit_message(self.process, self.log_path))


@contextlib.contextmanager
def local_engine(
    command: Sequence[str],
    *,
    port: int,
    log_path: Path | str,
    env: Mapping[str, str] | None = None,
    host: str = "127.0.0.1",
    ready_s: float = READY_S,
    grace_s: float = GRACE_S,
    now: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[LocalEngine]:
    """Start an engine, yield it once /health or /v1/models answers, and stop it with all its processes.

    It runs in an own process group, but in this process' session: Linux shares processors between sessions
    (autogroups), and a client beside an engine of another session can be starved for seconds. If this process dies,
    even by SIGKILL, a keeper process ends the group.

    The command must listen at ``host`` and ``port``; ``env`` has variables on top of this process' own. The engine must
    be ready within ``ready_s``, and is killed ``grace_s`` after SIGTERM. ``now`` is a clock, ``pause`` sleeps.

    Raises:
        InputError: There is no such program.
        OutputError: The log cannot be written.
        EngineError: The port is taken, or the engine exited or was not ready in time; with its last lines.
    """
    if is_taken(host, port):
        raise EngineError(f"port {port} of {host} must be free; something listens there. Choose another port")
    log_path = Path(log_path)
    try:
        log = log_path.open("wb")
    except OSError as error:
        raise OutputError(f"cannot write the engine's log {log_path}: {error.strerror}") from error
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
    options |= {"env": {**os.environ, **(env or {})}, "process_group": 0}
    with log:
        try:
            process = subprocess.Popen(list(command), **options)  # noqa: S603 - the purpose is to run it
        except OSError as error:
            raise InputError(f"the engine's program must be there: {command[0]}: {error.strerror}") from error
    with _ended_with_this_process(process, grace_s):
        try:
            start_s = now()
            while not is_ready(host, port):
                if process.poll() is not None:
                    raise EngineError(_exit_message(process, log_path))
                if now() - start_s > ready_s:
                    raise EngineError(
                        f"the engine must be ready within {ready_s:g} s; at {host}:{port} nothing answered. Give it "
                        f"more time, or see {log_path}:\n{last_lines(log_path)}"
                    )
                pause(_POLL_INTERVAL_S)
            yield LocalEngine(f"http://{host}:{port}", process, log_path, now() - start_s)
        finally:
            stop(process, grace_s, now=now, pause=pause)


def stop(
    process: subprocess.Popen[bytes],
    grace_s: float = GRACE_S,
    *,
    now: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """End a process and its group by SIGTERM, and after ``grace_s`` by SIGKILL."""

    def wait(done: Callable[[], bool], limit_s: float) -> None:
        end_s = now() + limit_s
        while not done() and now() < end_s:
            pause(0.05)

    _signal(process.pid, signal.SIGTERM)
    wait(lambda: process.poll() is not None, grace_s)
    wait(lambda: not _signal(process.pid, 0), _CHILDREN_S if process.poll() is not None else 0.0)
    _signal(process.pid, signal.SIGKILL)
    process.wait()


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free port, another one at each call; raise OutputError if there is none.

    It is outside the ephemeral range: the system could give an ephemeral port to another program while the
    engine starts, and engines use some themselves meanwhile.
    """
    for _ in _PORTS:
        port = _PORTS[next(_next_port) % len(_PORTS)]
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind((host, port))
            return port
    raise OutputError(f"a port of {host} from {_PORTS[0]} to {_PORTS[-1]} must be free; all are taken")


def last_lines(path: Path, lines: int = LAST_LINES) -> str:
    """Return the end of a log."""
    with contextlib.suppress(OSError):
        return "\n".join(path.read_text("utf-8", "replace").splitlines()[-lines:])
    return ""


@contextlib.contextmanager
def _ended_with_this_process(process: subprocess.Popen[bytes], grace_s: float) -> Iterator[None]:
    """Run a keeper that ends the group if this process dies within the block."""
    words = [sys.executable, "-I", "-S", _process_keeper.__file__, str(process.pid), str(grace_s)]
    try:
        keeper = subprocess.Popen(words, stdin=subprocess.PIPE, process_group=0)  # noqa: S603 - our own script
    except OSError:
        stop(process, 0.0)
        raise
    try:
        yield
    finally:
        keeper.kill()
        keeper.wait()
        if keeper.stdin:
            keeper.stdin.close()


def _exit_message(process: subprocess.Popen[bytes], log_path: Path) -> str:
    return f"the engine ended with status {process.returncode}; see {log_path}:\n{last_lines(log_path)}"


def _signal(group: int, number: int) -> bool:
    """Send a signal and return whether the group exists."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
