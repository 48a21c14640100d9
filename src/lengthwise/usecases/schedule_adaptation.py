"""Schedules that follow live lengths, and replays of recorded requests to them."""

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
from lengthwise.schema.errors import InputError, error_note
from lengthwise.schema.records import RunResult, Status
from lengthwise.schema.schedule import Adaptation, ScheduleRow, Watched
from lengthwise.schema.workload import Workload
from lengthwise.usecases.schedule import question_of
from lengthwise.usecases.schedule_plan import PlannedRun, phases_of, share_of

Ints = npt.NDArray[np.int64]
FAR = 50  # requests at this distance in order of arrival have only the time of day in common


@dataclass(frozen=True, eq=False)
class ObservedRequests:
    """Requests in order of arrival, as an adapter observes them."""

    prompt_tokens: Ints  # [n]
    output_tokens: Ints  # [n]
    at_s: npt.NDArray[np.float64]  # [n] time at which the lengths of a request and of all before it are known
    name: str = ""
    left_out: int = 0

    @classmethod
    def of_records(cls, measured: RunResult) -> ObservedRequests:
        """Return the finished requests of a run. Raises InputError if no request finished."""
        ran = measured.records.requests
        finished = np.flatnonzero((ran.status == Status.FINISHED) & (ran.output_tokens > 0))
        if not len(finished):
            raise InputError(f"{measured.records.name} must hold a finished request; there is none")
        order = finished[np.argsort(ran.arrival_s[finished], kind="stable")]
        known_s = np.maximum.accumulate(ran.finished_s[order])
        left_out = len(ran.status) - len(finished)
        return cls(ran.prompt_tokens[order], ran.output_tokens[order], known_s, measured.records.name, left_out)

    @classmethod
    def of_workload(cls, workload: Workload) -> ObservedRequests:
        """Return the requests of a trace, observed at arrival, because a trace has no times of completion."""
        return cls(workload.prompt_tokens, workload.output_tokens, workload.arrival_s, workload.name)

    def __len__(self) -> int:
        return len(self.at_s)


def adapter_of(
    scenario: Scenario,
    monitor: schedule.Monitor | None = None,
    options: schedule.ReplanOptions | None = None,
    *,
    deployed: ScheduleRow | None = None,
    bound_s: float | None = None,
) -> schedule.Adapter:
    """Return an adapter that starts with the best schedule of a scenario, or with the deployed one.

    It changes the schedule when lengths change. The caller passes each request to ``Adapter.observe``, in order of
    arrival, and runs ``Adapter.deployed``.

    Args:
        deployed: The schedule that runs, by default the best one.
        bound_s: Latency bound, by default the scenario's.

    Raises:
        ScheduleError: No schedule meets the bound, or the model does not fit.
        InputError: The deployed schedule does not fit the scenario's GPUs and lengths.
    """
    with error_note(f"in {scenario.source}"):
        requested = question_of(scenario)
        planner, bound = requested.planner, requested.section.latency_bound if bound_s is None else bound_s
        row = planner.best(bound).row if deployed is None else deployed
        if deployed is not None:
            latency_s = evaluate_deployed(planner.estimator, deployed, worst_case=planner.worst_case)[1]
            if not math.isfinite(latency_s):
                raise InputError(f"{deployed.words} must fit the GPUs and lengths of the scenario; it does not")
    requests = None if requested.sample is None else requested.sample.requests
    return schedule.Adapter(planner, row, bound, requests=requests, monitor=monitor, options=options)


def replay(adapter: schedule.Adapter, observed: ObservedRequests, name: str = "") -> Watched:
    """Return what an adapter would have decided if it had observed recorded requests."""
    planned, monitor = adapter.deployed, adapter.watcher.monitor
    rows = zip(observed.prompt_tokens.tolist(), observed.output_tokens.tolist(), observed.at_s.tolist(), strict=True)
    tested = [tokens[:: monitor.every] for tokens in (observed.prompt_tokens, observed.output_tokens)]
    found = tuple(change for row in rows if (change := adapter.observe(*row)) is not None)
    return Watched(
        name=name,
        live=observed.name,
        requests=len(observed),
        left_out=observed.left_out,
        bound_s=adapter.bound_s,
        false_positive_rate=monitor.false_positive_rate,
        planned=planned,
        planned_lengths=adapter.planned_lengths,
        deployed=adapter.deployed,
        adaptations=found,
        matching=max(map(_neighbour_correlation, tested)),
        evidence=adapter.watcher.evidence,
    )


def _neighbour_correlation(tokens: Ints) -> float:
    """Return the rank correlation of neighbours minus that at distance FAR, or 0 if there are few requests."""
    if len(tokens) < 10 * FAR:
        return 0.0
    ranks = np.argsort(np.argsort(tokens, kind="stable"), kind="stable").astype(np.float64)
    near, far = (float(np.corrcoef(ranks[:-lag], ranks[lag:])[0, 1]) for lag in (1, FAR))
    return near - far


@dataclass(frozen=True)
class Adapted:
    """The decision after a change of lengths, and the schedule that runs from then on."""

    adaptation: Adaptation
    planned: PlannedRun


@dataclass(frozen=True)
class FollowOptions:
    """Options of a schedule that changes when the lengths of live requests change."""

    monitor: schedule.Monitor = field(default_factory=schedule.Monitor)
    replan: schedule.ReplanOptions = field(default_factory=schedule.ReplanOptions)  # weights are never loaded
    max_num_seqs: float = math.inf  # requests that every engine runs at once; infinite: any


class PhaseFollower:
    """Observes the lengths of live requests, and plans new phases after the lengths changed.

    A phase prefills a batch and then decodes for a number of iterations. The layout of the GPUs stays the same, but
    batch sizes and numbers of iterations may change. Equal requests give equal results. ``adapter`` must not reload
    weights. ``max_num_seqs`` is the limit in ``FollowOptions``.
    """

    def __init__(self, adapter: schedule.Adapter, planned: PlannedRun, max_num_seqs: float = math.inf) -> None:
        self._adapter, self._planned, self._max_num_seqs = adapter, planned, max_num_seqs

    @property
    def evidence(self) -> float:
        """Return the evidence of a change, which starts at 1 (``schedule.drift_monitor.Evidence``)."""
        return self._adapter.watcher.evidence

    @property
    def false_positive_rate(self) -> float:
        """Return the upper bound on the probability of ever raising an alarm if lengths never change."""
        return self._adapter.watcher.monitor.false_positive_rate

    def observe(self, prompt_tokens: int, output_tokens: int, at_s: float) -> ReplanEvent | None:
        """Observe the next request in order of arrival. Return an event if lengths changed or were estimated again."""
        adaptation = self._adapter.observe(prompt_tokens, output_tokens, at_s)
        if adaptation is None:
            return None
        change, task, before = adaptation.change, self._adapter.task, self._planned.phases
        row = change.new if change.made else change.retained
        if row is None:  # No schedule fits or meets the bound: keep this one, with at most the longest output's steps.
            row = self._adapter.deployed
            row = replace(row, decode_steps=min(row.decode_steps, task.max_output_tokens))
        phases = limited(phases_of(row, task, None if before is None else before.threshold), self._max_num_seqs)
        bound = replace(self._planned.bound, tokens=change.after.quantile_tokens)
        share = share_of(task, bound.tokens, bound.level)
        self._planned = replace(self._planned, row=row, phases=phases, bound=bound, share=share)
        message, more = tuple(adaptation_sentences(adaptation)), Adapted(adaptation, self._planned)
        return ReplanEvent(message=message, phases=phases, schedule=row.words, more=more)


def limited(phases: Phases, max_num_seqs: float) -> Phases:
    """Return the phases with at most ``max_num_seqs`` requests in flight, but at least one prefill batch."""
    planned = phases.max_requests or phases.prefill_batch
    return replace(phases, max_requests=int(max(min(planned, max_num_seqs), phases.prefill_batch)))


def follower_of(scenario: Scenario, planned: PlannedRun, follow: FollowOptions = FollowOptions()) -> PhaseFollower:
    """Return a follower with which a schedule of phases adapts to live lengths."""
    options = replace(follow.replan, allow_reload=False, max_num_seqs=follow.max_num_seqs)
    adapter = adapter_of(scenario, follow.monitor, options, deployed=planned.row, bound_s=planned.bound.limit_s)
    return PhaseFollower(adapter, planned, follow.max_num_seqs)


def follower_factory(scenario: Scenario, planned: PlannedRun, follow: FollowOptions) -> Callable[[], PhaseFollower]:
    """Return a function that calls ``follower_of`` in another process. Raises InputError now if the call would fail."""
    follower_of(scenario, planned, follow)
    return partial(follower_of, scenario, planned, follow)
