"""The very same run in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lengthwise.apps.launch.contracts import Launcher
from lengthwise.apps.launch.virtual import run_virtually
from lengthwise.apps.ledger.contracts import Ledger
from lengthwise.apps.run.contracts import Job
from lengthwise.apps.run.coordinator import Coordinator
from lengthwise.apps.run.ending import Ended
from lengthwise.apps.run.progress import Progress
from lengthwise.apps.run.reuse import Reused


def run_simulated(
    job: Job,
    ledger: Ledger,
    launcher: Launcher,
    *,
    from_s: float = 0.0,
    watch: Callable[[Progress], None] | None = None,
    watch_s: float = 60.0,
    begun: Callable[[Reused], None] | None = None,
) -> Ended:
    """How a run ends whose engines are simulated; its seconds are virtual.

    Args:
        job: What to run.
        ledger: Where answers are kept; its times are virtual too.
        launcher: Of simulated engines.
        from_s: The clock at the start: later than that of a run that is gone on with.
        watch: Shown how far it is.
        watch_s: How often, in virtual seconds.
        begun: Told what is kept of a run before, before engines start.
    """

    async def whole() -> Ended:
        loop = asyncio.get_running_loop()
        return await Coordinator(
            job,
            ledger,
            launcher,
            now_s=lambda: from_s + loop.time(),
            watch=watch,
            watch_s=watch_s,
            begun=begun,
        ).run()

    return run_virtually(whole())
