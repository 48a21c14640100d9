"""Python processes of the gateway's own, spoken to over their pipes: begun, and ended whatever they do."""

from __future__ import annotations

import asyncio
import contextlib
import sys


async def spawned(module: str) -> asyncio.subprocess.Process:
    """Start a child process that runs ``main`` of a module; a cancelled start ends it."""
    code = f"import sys; sys.path[:] = {sys.path!r}\nfrom {module} import main; main()"
    pipe = asyncio.subprocess.PIPE
    spawning = asyncio.ensure_future(
        asyncio.create_subprocess_exec(sys.executable, "-c", code, stdin=pipe, stdout=pipe)
    )
    try:
        return await asyncio.shield(spawning)
    except asyncio.CancelledError:  # it is there all the same
        close(await spawning)
        raise


def close(process: asyncio.subprocess.Process) -> None:
    """Ends a process and its pipes."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    if process.stdin is not None:
        process.stdin.close()
    transport = getattr(process, "_transport", None)  # nothing public closes the pipe that is read
    if transport is not None:
        transport.close()


async def reaped(process: asyncio.subprocess.Process, within_s: float) -> None:
    """Returns when a closed one is gone, or after so long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await process.wait()
    await asyncio.sleep(0)
