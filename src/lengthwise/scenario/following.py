"""A schedule of phases that follows live lengths, as a gateway takes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from lengthwise import schedule
from lengthwise.gateway.follow import News
from lengthwise.gateway.phasing import Phases
from lengthwise.report.schedule import adapted_said
from lengthwise.scenario.adapting import adapter_of
from lengthwise.scenario.scenario import Scenario
from lengthwise.scenario.schedule_plans import PlannedRun, phases_of, share_of
from lengthwise.schema.adaptation import Adaptation
from lengthwise.schema.schedule_row import ScheduleRow


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
        watch: How lengths are watched.
        terms: When a change is worth it. Weights are never loaded: that is only told.
        seats: Requests that every engine runs at once; infinite: any.
    """

    watch: schedule.Watch = field(default_factory=schedule.Watch)
    terms: schedule.Terms = field(default_factory=schedule.Terms)
    seats: float = math.inf


class PhaseFollower:
    """Watches lengths, and tells the phases that are best once they moved. Equal requests give equal news.

    What runs goes on with the same layout: batches, phases and the means that encodings are resized to may change.

    Args:
        adapter: Of the schedule that runs, which loads nothing.
        planned: That schedule.
        seats: Requests that every engine runs at once; infinite: any.
    """

    def __init__(self, adapter: schedule.Adapter, planned: PlannedRun, seats: float = math.inf) -> None:
        self._adapter, self._planned, self._seats = adapter, planned, seats

    @property
    def evidence(self) -> float:
        """What a unit staked on a move became."""
        return self._adapter.watcher.evidence

    @property
    def false_alarms(self) -> float:
        """Probability of ever an alarm while lengths do not change."""
        return self._adapter.watcher.watch.false_alarms

    def observe(self, prompt_tokens: int, output_tokens: int, at_s: float) -> News | None:
        """One more request, in the order of arrival; news if lengths moved, or are known better.

        Raises:
            InputError: It cannot be planned; what runs goes on.
            ScheduleError: Likewise.
        """
        told = self._adapter.observe(prompt_tokens, output_tokens, at_s)
        if told is None:
            return None
        self._planned = self._now(told)
        return News(
            said=tuple(adapted_said(told)),
            phases=self._planned.phases,
            schedule=self._planned.row.words,
            more=Adapted(told, self._planned),
        )

    def _now(self, told: Adaptation) -> PlannedRun:
        """What runs from now on; a schedule that was left has other means, too."""
        change, task = told.change, self._adapter.task
        row = change.new if change.made else change.kept
        if row is None:  # nothing meets the bound, or fits: it goes on as it can
            row = _within(self._adapter.deployed, task)
        before = self._planned.phases
        phases = phases_of(row, task, None if before is None else before.threshold)
        tokens = change.after.quantile_tokens
        return replace(
            self._planned,
            row=row,
            phases=seated(phases, self._seats),
            bound_tokens=tokens,
            share=share_of(task, tokens, self._planned.level),
        )


def seated(phases: Phases, seats: float) -> Phases:
    """The phases with no more in flight than an engine runs at once."""
    most = phases.most_in_flight or phases.encode_batch
    return replace(phases, most_in_flight=int(max(min(most, seats), phases.encode_batch)))


def follower_of(scenario: Scenario, planned: PlannedRun, follow: Follow = Follow()) -> PhaseFollower:
    """Who has a schedule of phases follow live lengths.

    Args:
        scenario: What it was planned for.
        planned: The schedule that runs.
        follow: How it follows.

    Raises:
        InputError: Something of it does not work out; a note says where.
    """
    terms = replace(follow.terms, may_load=False, seats=follow.seats)
    adapter = adapter_of(scenario, follow.watch, terms, deployed=planned.row, bound_s=planned.bound_s)
    return PhaseFollower(adapter, planned, follow.seats)


def follower_maker(
    scenario: Scenario, planned: PlannedRun, follow: Follow = Follow()
) -> Callable[[], PhaseFollower]:
    """The same, to be made in another process; what would not work there is said here.

    Raises:
        InputError: As ``follower_of`` does.
    """
    follower_of(scenario, planned, follow)
    return partial(follower_of, scenario, planned, follow)


def _within(row: ScheduleRow, task: schedule.TaskLengths) -> ScheduleRow:
    """A schedule whose phases are no longer than the longest output."""
    return replace(row, decode_steps=min(row.decode_steps, task.max_output_tokens))


__all__ = ["Adapted", "Follow", "PhaseFollower", "follower_maker", "follower_of", "seated"]
