"""Runs a real engine as a process of this machine: starts it, waits for it, and ends it with all its processes."""

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
    """Return whether the port cannot be bound, usually because a program listens there."""
    with socket.socket() as listener, contextlib.suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        return False
    return True


def is_ready(host: str, port: int) -> bool:
    """Return whether the engine is ready for requests: a path of HEALTH answers with status 200."""
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
    """An engine that runs on this machine and is ready for requests."""

    url: str  # without a path
    process: subprocess.Popen[bytes]  # leads a process group
    log_path: Path
    ready_after_s: float  # from the start of the process until the engine was ready

    @property
    def is_alive(self) -> bool:
        """Return whether the engine's process runs."""
        return self.process.poll() is None

    def check(self) -> None:
        """Raise EngineError, with the last lines of the log, if the engine's process has ended."""
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

    The engine has its own process group, but the session of this process: Linux divides processors between sessions
    (autogroups), so that an engine in another session can starve a client for seconds. If this process dies, even by
    SIGKILL, a keeper process ends the group.

    The command must listen at ``host`` and ``port``. ``env`` is added to this process' environment variables. The
    engine must be ready within ``ready_s``, and is killed ``grace_s`` after SIGTERM. ``pause`` sleeps.

    Raises:
        InputError: The program cannot be run.
        OutputError: The log cannot be written.
        EngineError: The port is taken, or the engine exited or was not ready in time. The message has the last lines of
            its log.
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
            raise InputError(f"the engine's program {command[0]} cannot be run: {error.strerror}") from error
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
    """Send SIGTERM to a process and its group, and SIGKILL after ``grace_s``, or 2 s after the process has ended."""

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
    """Return a free port, the next one at each call. Raises OutputError if there is none."""
    with reserved_port(host) as port:
        return port


@contextlib.contextmanager
def reserved_port(host: str = "127.0.0.1") -> Iterator[int]:
    """Yield a free port that no other process reserves within the block. Raises OutputError if there is none.

    A UDP socket at the port is the reservation. With a TCP socket, engines without SO_REUSEPORT could not listen, and
    two engines with it, such as vLLM, would share the port. The port is outside the ephemeral range, from which the
    system gives ports to other programs and engines take ports themselves.
    """
    for _ in _PORTS:
        port = _PORTS[next(_next_port) % len(_PORTS)]
        with socket.socket(type=socket.SOCK_DGRAM) as reservation:
            try:
                reservation.bind((host, port))
                with socket.socket() as listener:
                    listener.bind((host, port))
            except OSError:
                continue
            yield port
            return
    raise OutputError(f"a port of {host} from {_PORTS[0]} to {_PORTS[-1]} must be free; all are taken")


def last_lines(path: Path, lines: int = LAST_LINES) -> str:
    """Return the last lines of a log, or "" if the log cannot be read."""
    with contextlib.suppress(OSError):
        return "\n".join(path.read_text("utf-8", "replace").splitlines()[-lines:])
    return ""


@contextlib.contextmanager
def _ended_with_this_process(process: subprocess.Popen[bytes], grace_s: float) -> Iterator[None]:
    """Run a keeper process within the block, which ends the engine's process group if this process dies."""
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
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
