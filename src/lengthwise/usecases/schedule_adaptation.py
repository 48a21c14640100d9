"""Let a schedule follow live lengths, and replay recorded requests to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from lengthwise import schedule
from lengthwise.config.scenario import Scenario
from lengthwise.gateway.config import Phases
from lengthwise.gateway.replanning import ReplanEvent
from lengthwise.report.schedule_text import adaptation_sentences
from lengthwise.schedule.length_drift import evaluate_deployed
from lengthwise.schema.errors import InputError, noted
from lengthwise.schema.records import RunResult, Status
from lengthwise.schema.schedule import Adaptation, ScheduleRow, Watched
from lengthwise.schema.workload import Workload
from lengthwise.usecases.schedule import question_of
from lengthwise.usecases.schedule_plan import PlannedRun, phases_of, share_of

Ints = npt.NDArray[np.int64]
FAR = 50
"""Requests at this distance have nothing in common but the time of day."""


@dataclass(frozen=True, eq=False)
class Live:
    """Requests in the order of their arrival, as an adapter observes them."""

    prompt_tokens: Ints  # [n] of each
    output_tokens: Ints  # [n] of each
    at_s: npt.NDArray[np.float64]  # [n] when its length and those of all earlier requests are known
    name: str = ""
    left_out: int = 0

    @classmethod
    def of_records(cls, measured: RunResult) -> Live:
        """Return the finished requests of a run; raise InputError if there is none."""
        ran = measured.records.requests
        finished = np.flatnonzero((ran.status == Status.FINISHED) & (ran.output_tokens > 0))
        if not len(finished):
            raise InputError(f"{measured.records.name} must hold a finished request; there is none")
        order = finished[np.argsort(ran.arrival_s[finished], kind="stable")]
        known_s = np.maximum.accumulate(ran.finished_s[order])
        left_out = len(ran.status) - len(finished)
        return cls(ran.prompt_tokens[order], ran.output_tokens[order], known_s, measured.records.name, left_out)

    @classmethod
    def of_workload(cls, workload: Workload) -> Live:
        """Return the requests of a trace, known as they arrive, because a trace does not record when they finished."""
        return cls(workload.prompt_tokens, workload.output_tokens, workload.arrival_s, workload.name)

    def __len__(self) -> int:
        return len(self.at_s)


def adapter_of(
    scenario: Scenario,
    monitor: schedule.Monitor | None = None,
    terms: schedule.ReplanOptions | None = None,
    *,
    deployed: ScheduleRow | None = None,
    bound_s: float | None = None,
) -> schedule.Adapter:
    """Return the best schedule of a scenario, or the one that runs, ready to follow live lengths.

    The caller passes each request to ``Adapter.observe``, in the order of arrival, and runs ``Adapter.deployed``.

    Args:
        deployed: The schedule that runs; None: the best.
        bound_s: Latency bound; None: the scenario's.

    Raises:
        ScheduleError: No schedule meets the bound, or the model does not fit.
    """
    with noted(f"in {scenario.source}"):
        requested = question_of(scenario)
        planner, bound = requested.planner, requested.section.latency_bound if bound_s is None else bound_s
        row = planner.best(bound).row if deployed is None else deployed
        if deployed is not None:
            latency_s = evaluate_deployed(planner.estimator, deployed, worst_case=planner.worst_case)[1]
            if not math.isfinite(latency_s):
                raise InputError(f"{deployed.words} must fit the GPUs and lengths of the scenario; it does not")
    requests = None if requested.sample is None else requested.sample.requests
    return schedule.Adapter(planner, row, bound, requests=requests, monitor=monitor, options=terms)


def replay(adapter: schedule.Adapter, live: Live, name: str = "") -> Watched:
    """Return what a schedule that follows lengths would have done over recorded requests."""
    planned, monitor = adapter.deployed, adapter.watcher.monitor
    rows = zip(live.prompt_tokens.tolist(), live.output_tokens.tolist(), live.at_s.tolist(), strict=True)
    found = tuple(change for row in rows if (change := adapter.observe(*row)) is not None)
    return Watched(
        name=name,
        live=live.name,
        requests=len(live),
        left_out=live.left_out,
        bound_s=adapter.bound_s,
        false_positive_rate=monitor.false_positive_rate,
        planned=planned,
        planned_lengths=adapter.planned_lengths,
        deployed=adapter.deployed,
        adaptations=found,
        matching=max(_matching(tokens[:: monitor.every]) for tokens in (live.prompt_tokens, live.output_tokens)),
        evidence=adapter.watcher.evidence,
    )


def _matching(tokens: Ints) -> float:
    """Return the rank correlation of neighbours minus that of requests fifty apart; 0 with too few requests."""
    if len(tokens) < 10 * FAR:
        return 0.0
    ranks = np.argsort(np.argsort(tokens, kind="stable"), kind="stable").astype(np.float64)
    near, far = (float(np.corrcoef(ranks[:-lag], ranks[lag:])[0, 1]) for lag in (1, FAR))
    return near - far


@dataclass(frozen=True)
class Adapted:
    """The result of lengths that changed, in addition to what a gateway is sent."""

    adaptation: Adaptation
    planned: PlannedRun


@dataclass(frozen=True)
class Follow:
    """How a schedule follows lengths."""

    monitor: schedule.Monitor = field(default_factory=schedule.Monitor)
    # When a change is worth it. Weights are never reloaded: such a change is only reported.
    terms: schedule.ReplanOptions = field(default_factory=schedule.ReplanOptions)
    max_num_seqs: float = math.inf  # requests that every engine runs at once; infinite: any


class PhaseFollower:
    """Watches lengths, and returns the best phases after they changed; equal requests give equal results.

    The layout stays: batches, phases and the means that prefill batches are resized to may change. ``adapter`` is of
    the schedule that runs, without reloading weights; ``max_num_seqs`` as in ``Follow``.
    """

    def __init__(self, adapter: schedule.Adapter, planned: PlannedRun, max_num_seqs: float = math.inf) -> None:
        self._adapter, self._planned, self._max_num_seqs = adapter, planned, max_num_seqs

    @property
    def evidence(self) -> float:
        """Return the evidence of a change: what a unit staked on it became."""
        return self._adapter.watcher.evidence

    @property
    def false_positive_rate(self) -> float:
        """Return the probability of any alarm while lengths do not change."""
        return self._adapter.watcher.monitor.false_positive_rate

    def observe(self, prompt_tokens: int, output_tokens: int, at_s: float) -> ReplanEvent | None:
        """Observe a request, in the order of arrival; return news if lengths changed, or are known better."""
        adaptation = self._adapter.observe(prompt_tokens, output_tokens, at_s)
        if adaptation is None:
            return None
        change, task, before = adaptation.change, self._adapter.task, self._planned.phases
        row = change.new if change.made else change.retained
        if row is None:  # no schedule meets the bound, or fits: this one goes on as far as outputs reach
            row = self._adapter.deployed
            row = replace(row, decode_steps=min(row.decode_steps, task.max_output_tokens))
        phases = limited(phases_of(row, task, None if before is None else before.threshold), self._max_num_seqs)
        bound = replace(self._planned.bound, tokens=change.after.quantile_tokens)
        share = share_of(task, bound.tokens, bound.level)
        self._planned = replace(self._planned, row=row, phases=phases, bound=bound, share=share)
        message, more = tuple(adaptation_sentences(adaptation)), Adapted(adaptation, self._planned)
        return ReplanEvent(message=message, phases=phases, schedule=row.words, more=more)


def limited(phases: Phases, max_num_seqs: float) -> Phases:
    """Return the phases with no more requests in flight than an engine runs at once."""
    planned = phases.max_requests or phases.prefill_batch
    return replace(phases, max_requests=int(max(min(planned, max_num_seqs), phases.prefill_batch)))


def follower_of(scenario: Scenario, planned: PlannedRun, follow: Follow = Follow()) -> PhaseFollower:
    """Return what makes a schedule of phases follow live lengths."""
    terms = replace(follow.terms, allow_reload=False, max_num_seqs=follow.max_num_seqs)
    adapter = adapter_of(scenario, follow.monitor, terms, deployed=planned.row, bound_s=planned.bound.limit_s)
    return PhaseFollower(adapter, planned, follow.max_num_seqs)


def follower_maker(scenario: Scenario, planned: PlannedRun, follow: Follow = Follow()) -> Callable[[], PhaseFollower]:
    """Return a factory of the follower for another process; raise InputError now if it would fail there."""
    follower_of(scenario, planned, follow)
    return partial(follower_of, scenario, planned, follow)
