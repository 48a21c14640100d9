"""What becomes of a schedule after lengths moved: left as it is, changed in place, or loaded anew."""

from __future__ import annotations

from dataclasses import dataclass

from lengthwise.schema.schedule_row import ScheduleRow


@dataclass(frozen=True)
class LengthFacts:
    """Lengths in four numbers of tokens each.

    Attributes:
        prompt_mean: Mean of the prompts.
        prompt_sd: Their standard deviation.
        output_mean: Mean of the outputs.
        output_sd: Their standard deviation.
        output_skewness: Of the outputs; 0 where all are alike.
        quantile_tokens: The output that the bound is for.
    """

    prompt_mean: float
    prompt_sd: float
    output_mean: float
    output_sd: float
    output_skewness: float
    quantile_tokens: int


@dataclass(frozen=True)
class Elsewhere:
    """A better schedule that would have to be loaded.

    Attributes:
        row: It.
        held_s: Its latency that the bound is held against.
        load_s: Seconds without service until it runs.
        storage: Where weights would be loaded from: "dram" or "ssd".
        repaid_s: After how long more requests have been served than without; infinite: never; NaN where it is not
            about throughput.
        why: What speaks for it, in words.
    """

    row: ScheduleRow
    held_s: float
    load_s: float
    storage: str
    repaid_s: float
    why: str


@dataclass(frozen=True)
class Change:
    """What is to be done about a deployed schedule.

    Attributes:
        before: Lengths that it was planned for.
        after: Lengths as they are now.
        bound_s: Latency that must be held; infinite: none.
        margin: How much tighter the bound was taken for the new schedule.
        free_rps: What the best has under the bound itself, without a margin; 0: nothing meets it.
        kept: The deployed schedule under the new lengths; None: memory or seats would not hold it.
        kept_held_s: Its latency that the bound is held against; infinite where it cannot run.
        late_share: Share of requests that then take longer than the bound; of those that the bound was for at
            most one minus its quantile were.
        new: The best there is now, worth its change or not; None: nothing meets the bound.
        new_held_s: Its latency.
        load_s: Seconds without service until it runs: 0 unless weights move.
        made: Whether to change.
        repaid_s: After how long more requests have been served than without the change; infinite: never; NaN where
            it is not about throughput.
        why: The reason, in words.
        elsewhere: What would be worth loading where that may not be done while serving; None: nothing.
    """

    before: LengthFacts
    after: LengthFacts
    bound_s: float
    margin: float
    free_rps: float
    kept: ScheduleRow | None
    kept_held_s: float
    late_share: float
    new: ScheduleRow | None
    new_held_s: float
    load_s: float
    made: bool
    repaid_s: float
    why: str
    elsewhere: Elsewhere | None = None

    @property
    def holds(self) -> bool:
        """Whether the deployed schedule still meets the bound."""
        return self.kept is not None and self.kept_held_s <= self.bound_s

    @property
    def moves_weights(self) -> bool:
        """Whether the new schedule has another layout."""
        return self.load_s > 0


@dataclass(frozen=True)
class Adaptation:
    """An alarm and what came of it.

    Attributes:
        request: The request at which it was sure that lengths moved, counted from 1.
        at_s: When that was.
        began: The request from which on lengths are taken to be others.
        began_s: When that was.
        requests: How many the new lengths were taken from.
        sides: "prompts", "outputs" or both.
        evidence: By side, what a unit staked on its change became.
        first: Whether it is the alarm itself; else the same change of lengths, told by more requests.
        change: What is to be done.
        first_held_s: Latency of the schedule that ran first under the new lengths, had nothing ever been done.
        first_late_share: Share of requests that would take longer than the bound under it.
    """

    request: int
    at_s: float
    began: int
    began_s: float
    requests: int
    sides: tuple[str, ...]
    evidence: dict[str, float]
    first: bool
    change: Change
    first_held_s: float
    first_late_share: float


@dataclass(frozen=True)
class Watched:
    """What a schedule that follows lengths did over some requests.

    Attributes:
        name: Of the question.
        live: Where the requests come from.
        requests: How many were told.
        left_out: How many more did not end on their own.
        bound_s: Latency that must be held; infinite: none.
        false_alarms: Probability of ever an alarm while lengths do not change.
        planned: The schedule that ran first.
        planned_lengths: What it was planned for.
        deployed: The one that runs at the end.
        adaptations: Alarms, and what came of them.
        alike: How much more a tested request is like the next one than like one fifty later: the larger rank
            correlation of both sides. Well above 0, alarms may be of that.
        evidence: At the end: what a unit staked on another change became; an alarm is given at 1 / false_alarms.
    """

    name: str
    live: str
    requests: int
    left_out: int
    bound_s: float
    false_alarms: float
    planned: ScheduleRow
    planned_lengths: LengthFacts
    deployed: ScheduleRow
    adaptations: tuple[Adaptation, ...]
    alike: float
    evidence: float

    @property
    def late(self) -> float:
        """Requests that would have taken longer than the bound, had the first schedule been left as it was."""
        ends = [*(one.began - 1 for one in self.adaptations[1:]), self.requests]
        spans = zip(self.adaptations, ends, strict=True) if self.adaptations else ()
        return sum(one.first_late_share * max(end - one.began + 1, 0) for one, end in spans)


__all__ = ["Adaptation", "Change", "Elsewhere", "LengthFacts", "Watched"]
