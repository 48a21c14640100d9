"""Python child processes of the gateway, driven over their pipes."""

from __future__ import annotations

import asyncio
import contextlib
import sys


async def spawn_module(module: str) -> asyncio.subprocess.Process:
    """Start a child process that runs ``main`` of a module; a cancelled start kills it."""
    code = f"import sys; sys.path[:] = {sys.path!r}\nfrom {module} import main; main()"
    pipe = asyncio.subprocess.PIPE
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(sys.executable, "-c", code, stdin=pipe, stdout=pipe)
    )
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
    transport = getattr(process, "_transport", None)  # no public method closes the pipe of stdout
    if transport is not None:
        transport.close()


async def wait_terminated(process: asyncio.subprocess.Process, timeout_s: float) -> None:
    """Wait until a closed process is gone, or the timeout."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await process.wait()
    await asyncio.sleep(0)
