"""Python child processes of the gateway, driven over their pipes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import struct
import sys

_LENGTH = struct.Struct("<I")


class FrameTooLongError(Exception):
    """A frame is longer than allowed."""


def frame(payload: bytes) -> bytes:
    """Return a payload with its length before it."""
    return _LENGTH.pack(len(payload)) + payload


async def read_frame(process: asyncio.subprocess.Process, max_bytes: int | None = None) -> bytes:
    """Return the next payload from a child's stdout; raise FrameTooLongError, or IncompleteReadError at its end."""
    assert process.stdout is not None
    length = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))[0]
    if max_bytes is not None and length > max_bytes:
        raise FrameTooLongError(f"a response of {length} bytes")
    return await process.stdout.readexactly(length)


class ParentPipe:
    """Frames between a child process and its parent; what the child prints goes to stderr from now on."""

    def __init__(self) -> None:
        self._output = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def receive(self) -> bytes | None:
        """Return the next payload; None at the end."""
        head = sys.stdin.buffer.read(_LENGTH.size)
        return sys.stdin.buffer.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else None

    def send(self, payload: bytes) -> None:
        """Write a payload."""
        self._output.write(frame(payload))
        self._output.flush()


async def spawn_module(module: str) -> asyncio.subprocess.Process:
    """Start a child process that runs ``main`` of a module; a cancelled start kills it."""
    command = ("-c", f"import sys; sys.path[:] = {sys.path!r}\nfrom {module} import main; main()")
    pipe = asyncio.subprocess.PIPE
    process = asyncio.create_subprocess_exec(sys.executable, *command, stdin=pipe, stdout=pipe)
    starting = asyncio.ensure_future(process)
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:  # the process starts all the same
        close(await starting)
        raise


def close(process: asyncio.subprocess.Process) -> None:
    """Kill a process and close its pipes."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    if process.stdin is not None:
        process.stdin.close()
    if (transport := getattr(process, "_transport", None)) is not None:  # no public method closes the pipe of stdout
        transport.close()


async def wait_terminated(process: asyncio.subprocess.Process, timeout_s: float) -> None:
    """Wait until a closed process is gone, or the timeout."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await process.wait()
    await asyncio.sleep(0)
