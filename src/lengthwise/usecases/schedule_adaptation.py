"""From a scenario to a schedule that follows live lengths, and a replay of recorded requests to it."""

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
from lengthwise.report.schedule_text import adapted_said
from lengthwise.schedule.length_drift import left_alone
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import Measured, Status
from lengthwise.schema.schedule import Adaptation, ScheduleRow, Watched
from lengthwise.schema.workload import Workload
from lengthwise.usecases.schedule import Question, question_of
from lengthwise.usecases.schedule_plan import PlannedRun, phases_of, share_of

Ints = npt.NDArray[np.int64]

FAR = 50
"""Requests so far apart have nothing in common but the time of day."""


@dataclass(frozen=True, eq=False)
class Live:
    """Requests as they are told to a watch: in the order of their arrival.

    Attributes:
        prompt_tokens: [n] of each.
        output_tokens: [n] of each.
        at_s: [n] when its length and that of all before it are known.
        name: Where they come from.
        left_out: Requests that did not end on their own.
    """

    prompt_tokens: Ints
    output_tokens: Ints
    at_s: npt.NDArray[np.float64]
    name: str = ""
    left_out: int = 0

    @classmethod
    def of_records(cls, measured: Measured) -> Live:
        """The requests of a run that finished.

        Raises:
            InputError: None did.
        """
        ran = measured.records.requests
        done = np.flatnonzero((ran.status == Status.FINISHED) & (ran.output_tokens > 0))
        if not len(done):
            raise InputError(f"{measured.records.name} must hold a finished request; there is none")
        order = done[np.argsort(ran.arrival_s[done], kind="stable")]
        known_s = np.maximum.accumulate(ran.finished_s[order])
        left_out = len(ran.status) - len(done)
        return cls(ran.prompt_tokens[order], ran.output_tokens[order], known_s, measured.records.name, left_out)

    @classmethod
    def of_workload(cls, workload: Workload) -> Live:
        """The requests of a trace, told as they arrive: when they ended is not known."""
        return cls(workload.prompt_tokens, workload.output_tokens, workload.arrival_s, workload.name)

    def __len__(self) -> int:
        return len(self.at_s)


def adapter_of(
    scenario: Scenario,
    monitor: schedule.Monitor | None = None,
    terms: schedule.Terms | None = None,
    *,
    deployed: ScheduleRow | None = None,
    bound_s: float | None = None,
) -> schedule.Adapter:
    """The best schedule of a scenario, or the one that runs, ready to follow live lengths.

    Whoever serves tells ``Adapter.observe`` each request, in the order of arrival, and runs ``Adapter.deployed``.

    Args:
        scenario: As ``plan_schedule`` takes it.
        monitor: How lengths are watched.
        terms: When a change is worth it.
        deployed: What runs; None: the best.
        bound_s: Latency that must be held; None: the scenario's.

    Raises:
        InputError: Something of it does not work out, or what runs does not fit there; a note says where.
        ScheduleError: No schedule meets the bound, or the model does not fit.
    """
    try:
        asked = question_of(scenario)
        bound = asked.section.latency_bound if bound_s is None else bound_s
        row = asked.planner.best(bound).row if deployed is None else _fitting(asked, deployed)
    except InputError as error:
        error.add_note(f"in {scenario.source}")
        raise
    requests = None if asked.sample is None else asked.sample.requests
    return schedule.Adapter(asked.planner, row, bound, requests=requests, monitor=monitor, terms=terms)


def _fitting(requested: Question, row: ScheduleRow) -> ScheduleRow:
    """The schedule, where the scenario's GPUs can run it."""
    if not math.isfinite(left_alone(requested.planner.estimator, row, worst_case=requested.planner.worst_case)[1]):
        raise InputError(f"{row.words} must fit the GPUs and lengths of the scenario; it does not")
    return row


def replay(adapter: schedule.Adapter, live: Live, name: str = "") -> Watched:
    """What a schedule that follows lengths would have done over recorded requests.

    Args:
        adapter: The schedule.
        live: The requests.
        name: Of the question.
    """
    planned = adapter.deployed
    rows = zip(live.prompt_tokens.tolist(), live.output_tokens.tolist(), live.at_s.tolist(), strict=True)
    answers = (adapter.observe(*row) for row in rows)
    found = tuple(answer for answer in answers if answer is not None)
    return Watched(
        name=name,
        live=live.name,
        requests=len(live),
        left_out=live.left_out,
        bound_s=adapter.bound_s,
        false_positive_rate=adapter.watcher.monitor.false_positive_rate,
        planned=planned,
        planned_lengths=adapter.planned_lengths,
        deployed=adapter.deployed,
        adaptations=found,
        matching=_matching(live, adapter.watcher.monitor.every),
        evidence=adapter.watcher.evidence,
    )


def _matching(live: Live, every: int) -> float:
    """How much likelier neighbours among those tested are of one size than requests fifty apart."""
    told = []
    for tokens in (live.prompt_tokens[::every], live.output_tokens[::every]):
        ranks = np.argsort(np.argsort(tokens, kind="stable"), kind="stable").astype(np.float64)
        told.append(_correlation(ranks, 1) - _correlation(ranks, FAR))
    return max(told)


def _correlation(ranks: npt.NDArray[np.float64], lag: int) -> float:
    """Of requests so far apart; 0 where there are too few to tell."""
    if len(ranks) < 10 * FAR:
        return 0.0
    return float(np.corrcoef(ranks[:-lag], ranks[lag:])[0, 1])


@dataclass(frozen=True)
class Adapted:
    """What came of lengths that moved, beside what a gateway is told.

    Attributes:
        adaptation: The alarm, and what was decided.
        planned: What runs from then on, and what it should yield with the lengths as they are.
    """

    adaptation: Adaptation
    planned: PlannedRun


@dataclass(frozen=True)
class Follow:
    """How a schedule follows lengths.

    Attributes:
        monitor: How lengths are watched.
        terms: When a change is worth it. Weights are never loaded: that is only told.
        max_num_seqs: Requests that every engine runs at once; infinite: any.
    """

    monitor: schedule.Monitor = field(default_factory=schedule.Monitor)
    terms: schedule.Terms = field(default_factory=schedule.Terms)
    max_num_seqs: float = math.inf


class PhaseFollower:
    """Watches lengths, and tells the phases that are best once they moved. Equal requests give equal news.

    What runs goes on with the same layout: batches, phases and the means that encodings are resized to may change.

    Args:
        adapter: Of the schedule that runs, which loads nothing.
        planned: That schedule.
        max_num_seqs: Requests that every engine runs at once; infinite: any.
    """

    def __init__(self, adapter: schedule.Adapter, planned: PlannedRun, max_num_seqs: float = math.inf) -> None:
        self._adapter, self._planned, self._max_num_seqs = adapter, planned, max_num_seqs

    @property
    def evidence(self) -> float:
        """What a unit staked on a move became."""
        return self._adapter.watcher.evidence

    @property
    def false_positive_rate(self) -> float:
        """Probability of ever an alarm while lengths do not change."""
        return self._adapter.watcher.monitor.false_positive_rate

    def observe(self, prompt_tokens: int, output_tokens: int, at_s: float) -> ReplanEvent | None:
        """One more request, in the order of arrival; news if lengths moved, or are known better.

        Raises:
            InputError: It cannot be planned; what runs goes on.
            ScheduleError: Likewise.
        """
        told = self._adapter.observe(prompt_tokens, output_tokens, at_s)
        if told is None:
            return None
        self._planned = self._now(told)
        return ReplanEvent(
            message=tuple(adapted_said(told)),
            phases=self._planned.phases,
            schedule=self._planned.row.words,
            more=Adapted(told, self._planned),
        )

    def _now(self, report: Adaptation) -> PlannedRun:
        """What runs from now on; a schedule that was left has other means, too."""
        change, task = report.change, self._adapter.task
        row = change.new if change.made else change.retained
        if row is None:  # nothing meets the bound, or fits: it goes on as it can
            row = _within(self._adapter.deployed, task)
        before = self._planned.phases
        phases = phases_of(row, task, None if before is None else before.threshold)
        tokens = change.after.quantile_tokens
        return replace(
            self._planned,
            row=row,
            phases=seated(phases, self._max_num_seqs),
            bound_tokens=tokens,
            share=share_of(task, tokens, self._planned.level),
        )


def seated(phases: Phases, max_num_seqs: float) -> Phases:
    """The phases with no more in flight than an engine runs at once."""
    most = phases.max_in_flight or phases.encode_batch
    return replace(phases, max_in_flight=int(max(min(most, max_num_seqs), phases.encode_batch)))


def follower_of(scenario: Scenario, planned: PlannedRun, follow: Follow = Follow()) -> PhaseFollower:
    """Who has a schedule of phases follow live lengths.

    Args:
        scenario: What it was planned for.
        planned: The schedule that runs.
        follow: How it follows.

    Raises:
        InputError: Something of it does not work out; a note says where.
    """
    terms = replace(follow.terms, may_load=False, max_num_seqs=follow.max_num_seqs)
    adapter = adapter_of(scenario, follow.monitor, terms, deployed=planned.row, bound_s=planned.bound_s)
    return PhaseFollower(adapter, planned, follow.max_num_seqs)


def follower_maker(scenario: Scenario, planned: PlannedRun, follow: Follow = Follow()) -> Callable[[], PhaseFollower]:
    """The same, to be made in another process; what would not work there is said here.

    Raises:
        InputError: As ``follower_of`` does.
    """
    follower_of(scenario, planned, follow)
    return partial(follower_of, scenario, planned, follow)


def _within(row: ScheduleRow, task: schedule.TaskLengths) -> ScheduleRow:
    """A schedule whose phases are no longer than the longest output."""
    return replace(row, decode_steps=min(row.decode_steps, task.max_output_tokens))
