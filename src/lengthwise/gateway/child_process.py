"""Python child processes of the gateway, which exchange frames with it over pipes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import struct
import sys

_LENGTH = struct.Struct("<I")


class FrameTooLongError(Exception):
    """A frame is longer than its receiver allows."""


def frame(payload: bytes) -> bytes:
    """Return a frame: four bytes with the length of the payload, then the payload."""
    return _LENGTH.pack(len(payload)) + payload


async def read_frame(process: asyncio.subprocess.Process, max_bytes: int | None = None) -> bytes:
    """Return the payload of a child's next frame.

    Raises:
        FrameTooLongError: The payload is longer than ``max_bytes``.
        asyncio.IncompleteReadError: The child has ended or closed its pipe.
    """
    assert process.stdout is not None
    length = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))[0]
    if max_bytes is not None and length > max_bytes:
        raise FrameTooLongError(f"a response of {length} bytes")
    return await process.stdout.readexactly(length)


class ParentPipe:
    """The child's side of the pipes to its parent. Once it exists, the child's prints go to stderr, not to the pipe."""

    def __init__(self) -> None:
        self._output = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def receive(self) -> bytes | None:
        """Return the payload of the parent's next frame, or None if the parent has closed its pipe."""
        head = sys.stdin.buffer.read(_LENGTH.size)
        return sys.stdin.buffer.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else None

    def send(self, payload: bytes) -> None:
        """Send a payload to the parent as one frame."""
        self._output.write(frame(payload))
        self._output.flush()


async def spawn_module(module: str) -> asyncio.subprocess.Process:
    """Start a child process that runs the function ``main`` of a module. Kill it if the task is cancelled meanwhile."""
    command = ("-c", f"import sys; sys.path[:] = {sys.path!r}\nfrom {module} import main; main()")
    pipe = asyncio.subprocess.PIPE
    process = asyncio.create_subprocess_exec(sys.executable, *command, stdin=pipe, stdout=pipe)
    starting = asyncio.ensure_future(process)
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:  # the process starts nevertheless
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
    """Wait at most ``timeout_s`` seconds until a process that ``close`` has killed has ended."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await process.wait()
    await asyncio.sleep(0)
