"""Engines that should answer and do not are named, with since when: in what is shown, and in the manifest."""

from __future__ import annotations

import asyncio
import json

import pytest
from simulated_world import World, fresh, plan, tasks_of

from lengthwise.apps.run import Exported, manifest
from lengthwise.cli.app_run import line, silent_engines, table


class Mute:
    """A launcher one of whose engines never gets ready, or never answers."""

    def __init__(self, launcher, gpus, *, starts):
        self._launcher, self._gpus, self._starts = launcher, gpus, starts

    def __getattr__(self, name):
        return getattr(self._launcher, name)

    async def start(self, plan, gpus):
        if gpus == self._gpus and not self._starts:
            await asyncio.Event().wait()
        engine = await self._launcher.start(plan, gpus)
        if gpus == self._gpus:
            engine.generate = self._never
        return engine

    async def _never(self, request, draft):
        await asyncio.Event().wait()


def watched(tmp_path, *, starts, most=8):
    """A run of two engines of a model, whose second one is mute, cancelled after some minutes: what was seen of it."""
    world, seen = World(tasks_of([0] * 40 + [1] * most), [(plan(0), plan(1))], gpus=2), []
    with fresh(tmp_path) as ledger:

        def look(progress):
            seen.append(progress)
            if progress.at_s > 400:
                ledger.set_metadata({"cancel": "1"})

        job = world.job()
        finished = world.run(ledger, launcher=Mute(world.launcher(), (1,), starts=starts), monitor=look)
    assert finished.how == "cancelled"
    metadata = manifest(job, finished, Exported({}, 0, 0), app="", inputs="", models={})
    return seen, finished, json.loads(json.dumps(metadata["silent"]))


@pytest.mark.parametrize("starts", [False, True], ids=["started", "requested"])
def test_an_engine_that_never_serves_is_named_with_since_when(tmp_path, starts):
    seen, finished, metadata = watched(tmp_path, starts=starts)
    since_s = 20.0 if starts else 0.0
    early = [one for one in seen if one.at_s < since_s + 30.0]
    late = [one for one in seen if one.at_s > since_s + 50.0]
    assert early
    assert late
    assert not any(one.silent for one in early)
    for progress in late:
        (silent,) = progress.silent
        assert (silent.model, silent.gpus) == (1, (1,))
        assert silent.since_s == pytest.approx(since_s, abs=1.0)
        assert silent.for_s == pytest.approx(progress.at_s - since_s, abs=1.0)
    reported = "m1 on GPU 1 has not answered for" if starts else "m1 on GPU 1 is not ready"
    assert reported in line(late[-1])
    assert silent_engines(late[-1]) == list(table(late[-1]).renderables[2:])
    if not starts:
        assert "after its start, 20 s were planned" in line(late[-1])
    (one,) = metadata
    assert (one["model"], one["gpus"]) == ("m1", [1])
    assert one["since_s"] == pytest.approx(since_s, abs=1.0)
    assert one["words"].startswith(reported)
    assert finished.silent[0].for_s == pytest.approx(finished.seconds - since_s, abs=1.0)


def test_engines_that_answer_are_never_called_silent(tmp_path):
    world, seen = World(tasks_of([0] * 3000 + [1] * 30), [(plan(0),), (plan(1),)], gpus=1, mean=400.0), []
    with fresh(tmp_path) as ledger:
        finished = world.run(ledger, monitor=seen.append, watch_s=1.0)
    assert finished.how == "done"
    assert finished.seconds > 60
    assert not any(one.silent for one in seen)
    assert finished.silent == ()


def test_a_start_that_is_cancelled_is_reported(tmp_path):
    """The model gets two GPUs once the other has finished; its start on one of them never came to an end."""
    world = World(tasks_of([0] * 40 + [1] * 8), [(plan(0), plan(1)), (plan(1, tp=2),)], gpus=2)
    with fresh(tmp_path) as ledger:
        finished = world.run(ledger, launcher=Mute(world.launcher(), (1,), starts=False))
    assert finished.how == "done"
    assert [event.what for event in finished.events if event.gpus == (1,)] == ["start", "stop"]


class SlowToAbort:
    """A launcher whose engines take half a minute to abort a request, and that counts forced stops."""

    def __init__(self, launcher):
        self._launcher, self.is_aborting, self.forced = launcher, False, 0

    def __getattr__(self, name):
        return getattr(self._launcher, name)

    async def start(self, plan, gpus):
        engine = await self._launcher.start(plan, gpus)
        generate = engine.generate

        async def slow(request, draft):
            try:
                return await generate(request, draft)
            except asyncio.CancelledError:
                self.is_aborting = True
                await asyncio.sleep(30.0)
                raise

        engine.generate = slow
        return engine

    def force_stop(self):
        self.forced += 1
        self._launcher.force_stop()


def test_a_run_that_is_cancelled_once_during_a_switch_is_not_forced(tmp_path):
    """The heartbeat reads the same cancellation again while engines of the last stage still abort their requests."""
    world = World(tasks_of([0] * 40 + [1] * 400), [(plan(0), plan(1)), (plan(1, tp=2),)], gpus=2)
    launcher = SlowToAbort(world.launcher())
    with fresh(tmp_path) as ledger:

        def look(_):
            if launcher.is_aborting:
                ledger.set_metadata({"cancel": "1"})

        finished = world.run(ledger, launcher=launcher, monitor=look)
    assert launcher.is_aborting
    assert (finished.how, launcher.forced) == ("cancelled", 0)
