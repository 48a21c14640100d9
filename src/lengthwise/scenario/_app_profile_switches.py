"""How long engines take to come and go: started, put to sleep, woken and stopped, several times."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from lengthwise.apps.launch import Launcher
from lengthwise.apps.launch.contracts import Engine
from lengthwise.schema.app import ModelPlan, Replica

Clock = Callable[[], float]
Seconds = dict[str, tuple[float, ...]]
"""By "start_s", "sleep_s", "wake_s" and "stop_s": each time's."""


def switch_seconds(
    launcher: Launcher,
    plan: ModelPlan,
    gpus: Replica,
    *,
    times: int,
    now_s: Clock,
    told: Callable[[int], None] = lambda _: None,
) -> Seconds:
    """Seconds of a replica's start, sleep, wake and stop, each as often as it was started.

    The first start finds weights and caches cold where they are; all count alike.

    Args:
        launcher: Starts it as a run will.
        plan: Whose replica.
        gpus: Where.
        times: How often.
        now_s: A clock that never goes back.
        told: Called with how often it was started and stopped so far.

    Raises:
        EngineError: It did not start, or did not wake.
    """

    async def all_times() -> list[Mapping[str, float]]:
        rounds = []
        for done in range(times):
            rounds.append(await _once(launcher, plan, gpus, now_s))
            told(done + 1)
        return rounds

    rounds = asyncio.run(all_times())
    names = ("start_s", "stop_s", "sleep_s", "wake_s")
    return {name: tuple(one[name] for one in rounds if name in one) for name in names}


async def _once(launcher: Launcher, plan: ModelPlan, gpus: Replica, now_s: Clock) -> Mapping[str, float]:
    found, at_s = {}, now_s()
    engine = await launcher.start(plan, gpus)
    found["start_s"] = now_s() - at_s
    try:
        found |= await _slept(launcher, engine, now_s)
    finally:
        at_s = now_s()
        await launcher.stop(engine)
    return {**found, "stop_s": now_s() - at_s}


async def _slept(launcher: Launcher, engine: Engine, now_s: Clock) -> Mapping[str, float]:
    """Seconds to sleep and to wake; nothing of an engine that cannot."""
    at_s = now_s()
    if not await launcher.sleep(engine):
        return {}
    asleep_s = now_s()
    await launcher.wake(engine)
    return {"sleep_s": asleep_s - at_s, "wake_s": now_s() - asleep_s}


__all__ = ["Clock", "Seconds", "switch_seconds"]
