"""Schedules under a latency bound: what was chosen, what else there was, and what drift would do to it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lengthwise.schema.schedule_row import ScheduleRow
from lengthwise.schema.schedule_spread import Spread


@dataclass(frozen=True)
class ScheduleSide:
    """The best of one strategy at one tensor-parallel degree, and why it is not the choice.

    Attributes:
        strategy: Whose.
        tp: Degree of its groups; 1: every GPU is a stage.
        best: The best that was met under the bound; None: nothing was.
        at_most_rps: No schedule of this side that meets the bound has more; of RRA about so (``at_most_proved``).
        points: Schedules of this side.
        evaluated: How many of them were estimated.
        why: Why it lost; "" for the choice.
    """

    strategy: str
    tp: int
    best: ScheduleRow | None
    at_most_rps: float
    points: int
    evaluated: int
    why: str

    @property
    def at_most_proved(self) -> bool:
        """Whether ``at_most_rps`` follows from the search: not for RRA, unless all of its schedules were estimated."""
        return self.strategy != "rra" or self.evaluated >= self.points


@dataclass(frozen=True)
class ScheduleParts:
    """The GPUs cut into equal parts that each serve by themselves.

    Attributes:
        gpus: Of a part; what is left over serves nothing.
        copies: How many parts.
        row: The best schedule of one.
    """

    gpus: int
    copies: int
    row: ScheduleRow

    @property
    def throughput_rps(self) -> float:
        """Of all parts."""
        return self.copies * self.row.throughput_rps

    @property
    def words(self) -> str:
        """As in "2 parts of 8 GPUs", or "4 GPUs alone"."""
        each = "1 GPU" if self.gpus == 1 else f"{self.gpus} GPUs"
        return f"{self.copies} parts of {each}" if self.copies > 1 else f"{each} alone"


@dataclass(frozen=True)
class FrontPoint:
    """A schedule that none of its strategy beats in both throughput and latency, and the latency that was held.

    ``band_rps`` is its throughput under cost tables that are off, as ``Spread`` has it; None: nothing is known of that.
    """

    held_s: float
    row: ScheduleRow
    band_rps: tuple[float, float] | None = None


@dataclass(frozen=True)
class OtherSystem:
    """What another system would yield on the same GPUs.

    Attributes:
        system: Which (``SYSTEM_NAMES``).
        best: Its best configuration under the bound; None: none meets it.
        low_rps: Lower end of the 95 % interval of that one's throughput; NaN without one.
        high_rps: Upper end.
        configurations: How many were played out.
        front: Those that none of its others beats in both throughput and latency.
    """

    system: str
    best: ScheduleRow | None
    low_rps: float
    high_rps: float
    configurations: int
    front: tuple[FrontPoint, ...]


@dataclass(frozen=True)
class Kink:
    """A bound from which on another kind of schedule is best."""

    bound_s: float
    words: str


@dataclass(frozen=True)
class DriftRow:
    """The chosen schedule under outputs of another distribution.

    Attributes:
        moved: "mean", "sd" or "skewness".
        change: Relative change of mean or sd; absolute change of the skewness.
        mean_tokens: Of the outputs as they then are.
        sd_tokens: Likewise.
        skewness: Likewise.
        kept: The schedule left as it is; None: memory would no longer hold it.
        kept_held_s: Its latency that the bound is held against; infinite where it cannot run.
        holds: Whether the bound would still be met.
        replanned: The best schedule for the new lengths; None: none meets the bound.
        margin: How much tighter the bound must have been for the schedule chosen under it to hold the bound now;
            0: it holds; NaN: no tighter bound would have kept it.
        reload: Whether re-planning moves weights, not only batch sizes and phases.
    """

    moved: str
    change: float
    mean_tokens: float
    sd_tokens: float
    skewness: float
    kept: ScheduleRow | None
    kept_held_s: float
    holds: bool
    replanned: ScheduleRow | None
    margin: float
    reload: bool


@dataclass(frozen=True)
class Redeployment:
    """Seconds to load the weights anew, and where the rates come from."""

    dram_s: float
    ssd_s: float
    source: str


@dataclass(frozen=True)
class TimelineBar:
    """One micro-batch on one stage."""

    stage: int
    start_s: float
    end_s: float
    encodes: bool
    micro_batch: int


@dataclass(frozen=True)
class SchedulePlan:
    """What ``lengthwise schedule`` answers.

    Attributes:
        name: Of the question.
        facts: What is fixed, by name.
        bound_s: Latency that must be held; infinite: none.
        level: Quantile of the output length that the bound is for.
        quantile_tokens: That output.
        worst_case: Whether the bound is held against ``latency_high_s``, else against ``latency_s``.
        chosen: The schedule.
        sides: Every strategy and degree, the chosen one's among them.
        gap: The best of all has at most (1 + gap) times the chosen one's throughput, if the tolerances hold.
        evaluated: Schedules estimated for the choice.
        points: Schedules there are.
        seconds: The choice took.
        static: Doing nothing: the largest static batch that meets the bound; None: none does. ``static_front``: at any.
        front: By strategy, from the least latency on.
        kinks: Where another kind of schedule takes over.
        drift: Rows of what drift would do.
        redeploy: What loading anew costs.
        stages: Names of the timeline's rows.
        timeline: A piece of the chosen schedule's steady state.
        spreads: How far the chosen schedule may be from that, by source.
        spread_notes: Of which sources nothing is known, a sentence each.
        others: Other systems that it was held against.
        threshold: Share of the mean that encodings and decode batches are kept within; None: they are not resized.
        parts: The GPUs cut into parts, where these serve more than all of them together; None: none do.
    """

    name: str
    facts: dict[str, str]
    bound_s: float
    level: float
    quantile_tokens: int
    worst_case: bool
    chosen: ScheduleRow
    sides: tuple[ScheduleSide, ...]
    gap: float
    evaluated: int
    points: int
    seconds: float
    static: ScheduleRow | None = None
    front: tuple[tuple[str, tuple[FrontPoint, ...]], ...] = ()
    kinks: tuple[Kink, ...] = ()
    drift: tuple[DriftRow, ...] = ()
    redeploy: Redeployment = Redeployment(math.nan, math.nan, "")
    stages: tuple[str, ...] = ()
    timeline: tuple[TimelineBar, ...] = ()
    spreads: tuple[Spread, ...] = ()
    spread_notes: tuple[str, ...] = ()
    others: tuple[OtherSystem, ...] = ()
    threshold: float | None = None
    static_front: tuple[FrontPoint, ...] = ()
    parts: ScheduleParts | None = None


__all__ = [
    "DriftRow",
    "FrontPoint",
    "Kink",
    "OtherSystem",
    "Redeployment",
    "ScheduleParts",
    "SchedulePlan",
    "ScheduleSide",
    "Spread",
    "TimelineBar",
]
