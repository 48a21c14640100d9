"""Runs a scenario: every variant at every seed, and what it all means."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from lengthwise import engine, metrics
from lengthwise.metrics import Slo, Summary
from lengthwise.scenario._load import load
from lengthwise.scenario.scenario import Scenario
from lengthwise.scenario.variants import Variant, build
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import Records

T = TypeVar("T")
Progress = Callable[[int, int], None]

USUAL_STEPS, MANY_STEPS = 200_000, 4_000_000


@dataclass(frozen=True)
class Outcome:
    """What came of one variant.

    Attributes:
        variant: What was asked.
        records: All that the first seed's run left behind.
        summaries: One a seed, in their order.
        summary: Over all seeds.
    """

    variant: Variant
    records: Records
    summaries: list[Summary]
    summary: Summary


def run(
    scenario: Scenario | Path | str,
    *,
    variants: Sequence[Variant] | None = None,
    jobs: int | None = None,
    progress: Progress = lambda *_: None,
    every_step: bool = False,
) -> list[Outcome]:
    """The outcome of every variant of a scenario, each simulated at every seed.

    All variants see the same requests at the same seed; where none has any chance in it (replays), one
    seed says it all and no other is run. Runs share this process: the compiled engine lets go of the
    interpreter, so that threads use all cores.

    Args:
        scenario: The scenario, or its file.
        variants: What ``build`` made of it, where the caller has done so already.
        jobs: Runs at a time; None: one a core.
        progress: Called with the runs done and the runs in all, from this thread.
        every_step: Keep the steps of larger runs than usual, as a timeline needs them.

    Raises:
        InputError: Something of the scenario cannot be used; a note names variant and seed.
    """
    asked = scenario if isinstance(scenario, Scenario) else load(scenario)
    sides = list(build(asked) if variants is None else variants)
    repeated = asked.run.seeds if any(side.has_chance for side in sides) else 1
    seeds = range(asked.run.seed, asked.run.seed + repeated)
    tasks = [
        partial(_one, side, seed, keep=seed == seeds[0], every_step=every_step)
        for seed in seeds
        for side in sides
    ]
    runs = _all(tasks, jobs or os.cpu_count() or 1, progress)
    return [_outcome(side, runs[at :: len(sides)]) for at, side in enumerate(sides)]


def _one(variant: Variant, seed: int, *, keep: bool, every_step: bool) -> tuple[Records | None, Summary]:
    asked = variant.scenario
    with _located(variant, seed):
        records = engine.simulate(
            variant.workload(seed),
            variant.deployment,
            seed=seed,
            time_limit_s=asked.run.time_limit_s,
            strict=asked.run.strict,
            keep_steps=MANY_STEPS if keep and every_step else USUAL_STEPS,
        )
        summary = metrics.summarize(records, variant.deployment, slo=_slo(asked), warmup_s=asked.run.warmup_s)
    return records if keep else None, summary


def _outcome(variant: Variant, runs: Sequence[tuple[Records | None, Summary]]) -> Outcome:
    records, summaries = runs[0][0], [summary for _, summary in runs]
    assert records is not None  # the first seed keeps its records
    return Outcome(variant, records, summaries, metrics.combine(summaries))


def _slo(scenario: Scenario) -> Slo | None:
    limits = scenario.slo
    if (limits.ttft, limits.tpot, limits.jct) == (None, None, None):
        return None
    return Slo(ttft_s=limits.ttft, tpot_s=limits.tpot, jct_s=limits.jct)


@contextmanager
def _located(variant: Variant, seed: int) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        error.add_note(f"in the run of {variant.name!r} with seed {seed}")
        raise


def _all(tasks: Sequence[Callable[[], T]], jobs: int, progress: Progress) -> list[T]:
    """The tasks' results in their order; the first error ends it.

    An engine that is still to be compiled runs the first task alone: threads would each compile it.
    """
    progress(0, len(tasks))
    alone = 0 if engine.ready() else 1
    results: dict[int, T] = {}
    for batch in (range(alone), range(alone, len(tasks))):
        for at, result in _threaded(tasks, batch, jobs):
            results[at] = result
            progress(len(results), len(tasks))
    return [results[at] for at in range(len(tasks))]


def _threaded(tasks: Sequence[Callable[[], T]], which: range, jobs: int) -> Iterator[tuple[int, T]]:
    """Results as they come. The threads are daemons, so that Ctrl-C need not wait for compiled code."""
    waiting: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, T | None, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        while (at := waiting.get()) is not None:
            try:
                done.put((at, tasks[at](), None))
            except BaseException as error:  # noqa: BLE001 - raised again where it can be seen
                done.put((at, None, error))

    threads = min(jobs, len(which))
    for item in [*which, *[None] * threads]:
        waiting.put(item)
    for _ in range(threads):
        threading.Thread(target=work, daemon=True).start()
    try:
        for _ in which:
            at, result, error = _next(done)
            if error is not None:
                raise error
            yield at, result  # type: ignore[misc]
    finally:
        _drain(waiting, threads)


def _next(done: queue.SimpleQueue[T]) -> T:
    """The next item; wakes now and then, for a Ctrl-C that reached another thread does not wake this one."""
    while True:
        try:
            return done.get(timeout=0.2)
        except queue.Empty:
            continue


def _drain(waiting: queue.SimpleQueue[int | None], threads: int) -> None:
    """Leaves the threads nothing but their end."""
    try:
        while True:
            waiting.get_nowait()
    except queue.Empty:
        for _ in range(threads):
            waiting.put(None)
