"""Runs a scenario: every variant at every seed, and what it all means."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import call
from pathlib import Path
from typing import TypeVar

from lengthwise import engine, metrics
from lengthwise.config.scenario import Scenario, load
from lengthwise.config.variants import Variant, build, untold_note
from lengthwise.metrics import Beyond, Slo, Summary
from lengthwise.schema.cost_tables import NOT_MEASURED, CostTables
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import Records
from lengthwise.search.workers import available_cpus, threads
from lengthwise.usecases import model_error

BINDS = 0.7
"""From this share of a front's time on, what requests wait for each other there grows fast."""


def front_note(cost: CostTables, rate_rps: float) -> str:
    """That the front binds at so many requests a second; "" where it does not."""
    busy = rate_rps * cost.front.queue_s
    if not busy > BINDS:
        return ""
    has = "is busy" if busy <= 1 else "has work for"
    return (
        f"The front before the engine binds: it takes one request at a time, {1e3 * cost.front.queue_s:.3g} ms each, "
        f"and {has} {busy:.0%} of the time at {rate_rps:.3g} requests a second. More or faster GPUs do not help; "
        "give what your own front takes (deployment.host)."
    )


def sent_rps(records: Records) -> float:
    """Requests a second over the time in which clients sent them; over the whole run where they sent all at once."""
    arrival_s = records.requests.arrival_s
    span_s = float(arrival_s.max() - arrival_s.min()) or records.end_s - float(arrival_s.min())
    return len(arrival_s) / span_s if span_s > 0 else 0.0


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
        summary: Over all seeds; with model intervals where the cost tables carry errors.
        out_of_range: Where any seed's run went beyond the measurements behind the cost tables.
        model_draws: Runs under tables that are a little off, behind the model intervals.
    """

    variant: Variant
    records: Records
    summaries: list[Summary]
    summary: Summary
    out_of_range: tuple[Beyond, ...] = ()
    model_draws: int = 0

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know, a sentence each: extrapolated steps, a front that binds, no model intervals."""
        said = [f"{one.description}." for one in self.out_of_range]
        if note := front_note(self.variant.deployment.cost, sent_rps(self.records)):
            said.append(note)
        if note := untold_note(self.variant.scenario):
            said.append(note)
        if note := model_error.hardware_note(self.variant.deployment):
            said.append(note)
        if NOT_MEASURED in self.variant.deployment.cost.source:
            said.append(_MADE_UP)
        if self.variant.deployment.cost.errors and not self.model_draws:
            said.append(_NO_MODEL.format(cause=_why_none(self.variant)))
        return tuple(said)


_MADE_UP = f"The cost tables rest on {NOT_MEASURED}: their source says which."
_NO_MODEL = "The cost model's own error is not in the intervals: {cause}."
_Run = tuple[Records | None, Summary, tuple[Beyond, ...]]


def _why_none(variant: Variant) -> str:
    if variant.scenario.run.model_draws == 0:
        return "run.model_draws is 0"
    return (
        f"runs of more than {model_error.LARGEST_RUN:,} requests are not repeated unasked; "
        f"run.model_draws = {model_error.DRAWS} repeats them"
    )


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
    seed says it all and no other is run. Where cost tables carry errors, the first seed is run again under
    tables that are off by as much, for the model intervals. Runs share this process: the compiled engine lets go of the
    interpreter, so that threads use all cores.

    Args:
        scenario: The scenario, or its file.
        variants: What ``build`` made of it, where the caller has done so already.
        jobs: Runs at a time; None: one a CPU that this process may use.
        progress: Called with the runs done and the runs in all, from this thread.
        every_step: Keep the steps of larger runs than usual, as a timeline needs them.

    Raises:
        InputError: Something of the scenario cannot be used; a note names variant and seed.
    """
    asked = scenario if isinstance(scenario, Scenario) else load(scenario)
    sides = list(build(asked) if variants is None else variants)
    repeated = asked.run.seeds if any(side.has_chance for side in sides) else 1
    seeds = range(asked.run.seed, asked.run.seed + repeated)
    tasks: list[Callable[[], _Run]] = [
        partial(_one, side, seed, keep=seed == seeds[0], every_step=every_step) for seed in seeds for side in sides
    ]
    again = [_off(side, seeds[0]) for side in sides]
    runs = _all([*tasks, *(task for some in again for task in some)], jobs or available_cpus(), progress)
    plain, off = runs[: len(tasks)], iter(runs[len(tasks) :])
    return [
        _outcome(side, plain[at :: len(sides)], [next(off)[1] for _ in some])
        for at, (side, some) in enumerate(zip(sides, again, strict=True))
    ]


def _off(variant: Variant, seed: int) -> list[Callable[[], _Run]]:
    """The runs behind a variant's model intervals."""
    draws = variant.scenario.run.model_draws
    if not variant.deployment.cost.errors or draws == 0:
        return []
    if draws is None and len(variant.workload(seed)) > model_error.LARGEST_RUN:
        return []
    off = model_error.perturbed_deployments(variant.deployment, draws or model_error.DRAWS)
    sides = [replace(variant, deployment=one) for one in off]
    return [partial(_one, side, seed, keep=False, every_step=False) for side in sides]


def _one(variant: Variant, seed: int, *, keep: bool, every_step: bool) -> _Run:
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
        summary = metrics.summarize(records, variant.deployment, slo=slo_of(asked), warmup_s=asked.run.warmup_s)
    return records if keep else None, summary, metrics.beyond_reach(records, variant.deployment)


def _outcome(variant: Variant, runs: Sequence[_Run], off: Sequence[Summary]) -> Outcome:
    records, summaries = runs[0][0], [summary for _, summary, _ in runs]
    assert records is not None  # the first seed keeps its records
    summary = metrics.combine(summaries)
    if off:
        summary = metrics.with_model_error(summary, summaries[0], off, model_error.LEVEL)
    beyond = metrics.worst_of([beyond for _, _, beyond in runs])
    return Outcome(variant, records, summaries, summary, beyond, len(off))


def slo_of(scenario: Scenario) -> Slo | None:
    """The limits of [slo] for a single request; None where there are none."""
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
    with threads(jobs) as workers:
        for batch in (range(alone), range(alone, len(tasks))):
            for at, result in workers.run([tasks[i] for i in batch], call):
                results[batch[at]] = result
                progress(len(results), len(tasks))
    return [results[at] for at in range(len(tasks))]
