"""What an engine told of its own steps, beside its requests: a log of each, or counters over busy stretches.

Of either only steps of requests that are fitted to are taken, so that a score of held-out ones stays one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lengthwise.measure.calibrate import _step_parts, _stretch_parts
from lengthwise.measure.calibrate._counters import counters_of
from lengthwise.measure.calibrate._log_seconds import not_of_steps
from lengthwise.measure.calibrate._log_steps import fitted_steps
from lengthwise.measure.calibrate._runs import BLOCKS, Run
from lengthwise.measure.calibrate._stretches import Stretches, stretches_of
from lengthwise.measure.calibrate.answer import METRICS
from lengthwise.measure.calibrate.iterations import LEAST_STEPS, Iterations, in_cells
from lengthwise.schema.deployment import Deployment

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Parts = Mapping[str, Floats]
STEPS_SAME = 10
WORTH = len(METRICS) * BLOCKS
"""So many observations is all that is told of steps worth: as many as a run's requests."""
OFF = "--scrape no leaves them out"
SEEN = "seen by the log"


@dataclass(frozen=True)
class Evidence:
    """[m] seconds of steps, alone or summed, that the tables must come to.

    Attributes:
        seconds: What the engine took.
        parts: What the tables say, by part.
        priced: The tables' seconds with the parameters' values.
        block: Which block of time each is of.
        weight: How much each counts.
    """

    seconds: Floats
    parts: Parts
    priced: Callable[[Parts, Mapping[str, float]], Floats]
    block: Ints
    weight: Floats

    def residuals(self, values: Mapping[str, float]) -> Floats:
        """[m] log(tables / engine)."""
        return np.asarray(np.log(self.priced(self.parts, values) / self.seconds))


@dataclass(frozen=True)
class StepsTold:
    """What of it is fitted to.

    Attributes:
        evidence: None: nothing.
        notes: What a reader must know of it.
        is_log: Whether steps are of a log, whose clock sees a part of the host.
        seen: Whether held-out requests may be in it.
    """

    evidence: Evidence | None
    notes: list[str]
    is_log: bool = False
    seen: bool = False


def told_of(
    runs: Sequence[Run], deployment: Deployment, iterations: Iterations | None, *, counters: bool
) -> StepsTold:
    """Of all runs: the log where there is one that tells of those that are fitted to, else their counters if asked."""
    told = StepsTold(None, []) if iterations is None else _of_log(iterations, runs, deployment)
    if told.evidence is not None or not counters:
        return told
    evidence, notes = counted([run for run in runs if run.fit.any()], deployment)
    return StepsTold(evidence, [*told.notes, *notes])


def seen(run: Run) -> Run:
    """The run under a name that says so, if any of its requests is held out."""
    return replace(run, name=f"{run.name} ({SEEN})") if run.held.any() else run


def _of_log(log: Iterations, runs: Sequence[Run], deployment: Deployment) -> StepsTold:
    fitted = sum(bool(run.fit.any()) for run in runs)
    taken = fitted_steps(log, runs)
    if why := not_of_steps(log if taken is None else log.taken(taken), runs):
        return StepsTold(None, [f"the log of steps was not fitted: {why}"])
    if taken is None:
        return StepsTold(logged(log, deployment, fitted), [_not_told(log)], is_log=True, seen=True)
    of = (
        f"of the {len(log):,} steps of the log {int(taken.sum()):,} are surely of requests that are fitted to"
    )
    if taken.sum() < LEAST_STEPS:
        why = "hold out a run of its own, or give the log of the engine that served the runs"
        return StepsTold(None, [f"the log of steps was not fitted: {of}, {LEAST_STEPS} is the least; {why}"])
    note = f"{of}, and only these were fitted"
    return StepsTold(logged(log.taken(taken), deployment, fitted), [note], is_log=True)


def _not_told(log: Iterations) -> str:
    """That held-out requests may be in the log."""
    return (
        f"which of the {len(log):,} steps of the log are of held-out requests cannot be told, by no run's tokens nor "
        f"by times, so all were fitted: scores are of requests {SEEN}, unless it is of the fitted runs alone. A log "
        "with the times that vLLM writes, and records of `lengthwise bench`, tell"
    )


def logged(iterations: Iterations, deployment: Deployment, runs: int) -> Evidence:
    """Of a log of steps, which stands beside so many runs as one more."""
    log = in_cells(iterations)
    m, steps = len(log), np.minimum(log.steps, STEPS_SAME)
    return Evidence(
        seconds=log.seconds,
        parts=_step_parts.step_parts(log, deployment),
        priced=_step_parts.seconds_of,
        block=runs * BLOCKS + np.arange(m) * BLOCKS // m,
        weight=np.sqrt(steps * min(1.0, WORTH / steps.sum())),
    )


def counted(runs: Sequence[Run], deployment: Deployment) -> tuple[Evidence | None, list[str]]:
    """Of the counters that runs keep (``bench(scrape=True)``), if any does; and what a reader must know of them.

    All stretches together count as much as a log of steps does; they are in the blocks of time of their run's requests.
    """
    kept = [(r, run) for r, run in enumerate(runs) if isinstance(run.measured.facts.get("metrics"), Mapping)]
    if kept and (why := _barred(deployment)):
        return None, [f"the server's counters were not fitted: {why}"]
    told = [(r, run, _stretches(run, deployment)) for r, run in kept]
    notes = [_not_fitted(run, found) for _, run, found in told if isinstance(found, str)]
    good = [(r, run, found) for r, run, found in told if isinstance(found, Stretches)]
    if not good:
        return None, notes
    return _summed(good, deployment), [_fitted([found for _, _, found in good]), *notes]


def _summed(told: Sequence[tuple[int, Run, Stretches]], deployment: Deployment) -> Evidence:
    """Of the stretches of runs, each with its number among those that are fitted to."""
    parts = [
        _stretch_parts.stretch_parts(found, run.workload.prompt_tokens, deployment) for _, run, found in told
    ]
    sizes = [(r, len(found)) for r, _, found in told]
    m = sum(size for _, size in sizes)
    return Evidence(
        seconds=np.concatenate([found.seconds for _, _, found in told]),
        parts={name: np.concatenate([each[name] for each in parts]) for name in parts[0]},
        priced=_stretch_parts.seconds_of,
        block=np.concatenate([r * BLOCKS + np.arange(size) * BLOCKS // size for r, size in sizes]),
        weight=np.full(m, np.sqrt(min(1.0, WORTH / m))),
    )


def _stretches(run: Run, deployment: Deployment) -> Stretches | str:
    counters = counters_of(run.measured.facts["metrics"])
    return counters if isinstance(counters, str) else stretches_of(run, counters, deployment.limits)


def _barred(deployment: Deployment) -> str:
    """Why sums of a server's steps are not sums of their seconds; empty where they are."""
    if deployment.parallel.replicas > 1:
        return f"they are sums over {deployment.parallel.replicas} replicas, whose steps overlap"
    return "steps of pipeline stages overlap" if deployment.parallel.pp > 1 else ""


def _fitted(found: Sequence[Stretches]) -> str:
    steps = int(sum(each.steps.sum() for each in found))
    of = f"{len(found)} run{'s' if len(found) > 1 else ''}"
    return (
        f"the server's own counters were fitted as well: {steps:,} steps in {sum(map(len, found)):,} stretches of {of} "
        f"in which it was busy throughout ({OFF})"
    )


def _not_fitted(run: Run, why: str) -> str:
    return f"the server's counters of {run.name} were not fitted: {why}"
