"""A real engine as a process of this machine: started, waited for, and gone afterwards."""

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

from lengthwise.backend import _process_keeper
from lengthwise.schema.errors import EngineError, InputError, OutputError

HEALTH = ("/health", "/v1/models")
PROBE_S = 5.0


def is_taken(host: str, port: int) -> bool:
    """Whether something listens at the port already."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            door.bind((host, port))
        except OSError:
            return True
    return False


def is_ready(host: str, port: int) -> bool:
    """Whether one of the addresses that tell of health answers with 200."""
    return any(_status(host, port, path) == http.HTTPStatus.OK for path in HEALTH)


def _status(host: str, port: int, path: str) -> int:
    """The HTTP status of a GET; 0 where nobody answers."""
    door = http.client.HTTPConnection(host, port, timeout=PROBE_S)
    try:
        door.request("GET", path)
        return door.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        door.close()


READY_S = 300.0
GRACE_S = 20.0
LAST_LINES = 25
_POLL_INTERVAL_S = 0.2
_REST_S = 2.0
"""How long what an engine had started may outlive it, before it is killed."""


@dataclass(frozen=True)
class LocalEngine:
    """An engine that runs and is ready.

    Attributes:
        url: Where it listens, without a path.
        process: The process that was started; it leads a group of its own.
        log_path: What it prints.
        ready_after_s: From its start until it was ready.
    """

    url: str
    process: subprocess.Popen[bytes]
    log_path: Path
    ready_after_s: float

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self.process.poll() is None

    def check(self) -> None:
        """Raises EngineError, with the last lines of its log, if it has ended."""
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
    """A started engine that answers at /health or /v1/models; at the end it is stopped, with all it started.

    It runs in a process group of its own, and in this process' session: Linux shares processors between sessions
    (autogroups), and lets a client stand still for seconds beside an engine of another. If this process dies, whatever
    of, a keeper ends the group.

    Args:
        command: The program and its arguments; it must listen at ``host`` and ``port``.
        port: Where it will listen.
        log_path: File for what it prints; written anew.
        env: Variables on top of this process' own.
        host: Address it listens at.
        ready_s: How long it may take until it is ready.
        grace_s: How long it may take to end when asked to, before it is killed.
        now: A clock in seconds.
        pause: Waits so many seconds.

    Raises:
        InputError: There is no such program.
        OutputError: The log cannot be written.
        EngineError: The port is taken, or the engine ended or was not ready in time; with its last lines.
    """
    if is_taken(host, port):
        raise EngineError(f"port {port} of {host} must be free; something listens there. Choose another port")
    log_path = Path(log_path)
    process = _started(command, log_path, {**os.environ, **(env or {})})
    with _retained(process, grace_s):
        try:
            after_s = _until_ready(process, host, port, log_path, ready_s, now, pause)
            yield LocalEngine(f"http://{host}:{port}", process, log_path, after_s)
        finally:
            stop(process, grace_s, now=now, pause=pause)


def stop(
    process: subprocess.Popen[bytes],
    grace_s: float = GRACE_S,
    *,
    now: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Ends a process and its group: asked first, killed after ``grace_s``."""
    _signal(process.pid, signal.SIGTERM)
    _until(lambda: process.poll() is not None, grace_s, now, pause)
    _until(lambda: not _signal(process.pid, 0), _REST_S if process.poll() is not None else 0.0, now, pause)
    _signal(process.pid, signal.SIGKILL)
    process.wait()


_PORTS = range(15_000, 32_768)
"""Below those that systems give to whoever names none (Linux from 32,768 on, others from 49,152)."""
_given = itertools.count(os.getpid() * 101)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens at just now, another one at each call.

    It is none that the system would give to another program between now and when it is listened at: engines take such
    ports for themselves while they start.

    Raises:
        OutputError: There is none.
    """
    import socket

    for _ in _PORTS:
        port = _PORTS[next(_given) % len(_PORTS)]
        with socket.socket() as door, contextlib.suppress(OSError):
            door.bind((host, port))
            return port
    raise OutputError(f"a port of {host} from {_PORTS[0]} to {_PORTS[-1]} must be free; all are taken")


def last_lines(path: Path, lines: int = LAST_LINES) -> str:
    """The end of a log, as text."""
    with contextlib.suppress(OSError):
        return "\n".join(path.read_text("utf-8", "replace").splitlines()[-lines:])
    return ""


def _started(command: Sequence[str], log_path: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    try:
        log = log_path.open("wb")
    except OSError as error:
        raise OutputError(f"cannot write the engine's log {log_path}: {error.strerror}") from error
    with log:
        try:
            return subprocess.Popen(  # noqa: S603 - to run what was given is what it is for
                list(command), env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, process_group=0
            )
        except OSError as error:
            raise InputError(f"the engine's program must be there: {command[0]}: {error.strerror}") from error


@contextlib.contextmanager
def _retained(process: subprocess.Popen[bytes], grace_s: float) -> Iterator[None]:
    """While this process lives, until the group has ended; then a second one ends it."""
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


def _until_ready(
    process: subprocess.Popen[bytes],
    host: str,
    port: int,
    log_path: Path,
    ready_s: float,
    now: Callable[[], float],
    pause: Callable[[float], None],
) -> float:
    """Seconds until the engine was ready; raises EngineError."""
    start_s = now()
    while not is_ready(host, port):
        if process.poll() is not None:
            raise EngineError(_exit_message(process, log_path))
        if now() - start_s > ready_s:
            raise EngineError(
                f"the engine must be ready within {ready_s:g} s; at {host}:{port} nobody answered. Give it more "
                f"time, or see {log_path}:\n{last_lines(log_path)}"
            )
        pause(_POLL_INTERVAL_S)
    return now() - start_s


def _exit_message(process: subprocess.Popen[bytes], log_path: Path) -> str:
    return f"the engine ended with status {process.returncode}; see {log_path}:\n{last_lines(log_path)}"


def _signal(group: int, number: int) -> bool:
    """Whether the group was there to be told."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _until(done: Callable[[], bool], most_s: float, now: Callable[[], float], pause: Callable[[float], None]) -> None:
    end_s = now() + most_s
    while not done() and now() < end_s:
        pause(0.05)
