"""A run in real time, which Ctrl-C and SIGTERM end in order."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable

from lengthwise.apps.launch.contracts import Launcher
from lengthwise.apps.ledger.contracts import Ledger
from lengthwise.apps.run.contracts import Job
from lengthwise.apps.run.coordinator import Coordinator
from lengthwise.apps.run.ending import Ended
from lengthwise.apps.run.progress import Progress
from lengthwise.apps.run.reuse import Reused

RESUME = "What was answered is kept; go on with the same command and --resume"


def run_here(
    job: Job,
    ledger: Ledger,
    launcher: Launcher,
    *,
    watch: Callable[[Progress], None] | None = None,
    watch_s: float = 0.5,
    stopping: Callable[[int], None] | None = None,
    begun: Callable[[Reused], None] | None = None,
) -> Ended:
    """How a run ends on engines of the real world.

    Ctrl-C or SIGTERM once: nothing more is leased, what is under way is cut and kept, engines are ended. Twice:
    engines are killed; the ledger is whole either way.

    Args:
        job: What to run.
        ledger: Where answers are kept.
        launcher: Of engines.
        watch: Shown how far it is.
        watch_s: How often.
        stopping: Told how often it was asked to stop.
        begun: Told what is kept of a run before, before engines start.
    """

    async def whole() -> Ended:
        one = Coordinator(job, ledger, launcher, now_s=time.time, watch=watch, watch_s=watch_s, begun=begun)
        asked = 0

        def stop() -> None:
            nonlocal asked
            asked += 1
            one.stop()
            if stopping is not None:
                stopping(asked)

        loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, stop)
        try:
            return await one.run()
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    return asyncio.run(whole())
