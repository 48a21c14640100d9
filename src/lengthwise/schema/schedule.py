"""Schedules under a latency bound: what was chosen, what else there was, and what drift would do to it."""

from __future__ import annotations

import math
from dataclasses import dataclass

SYSTEM_NAMES = {
    "fastertransformer": "FasterTransformer",
    "deepspeed-inference": "DeepSpeed-Inference",
    "orca": "Orca",
    "vllm": "vLLM v0",
    "sarathi": "Sarathi",
    "vllm-v1": "vLLM v1",
    "vllm-v1-disaggregated": "vLLM v1, disaggregated",
}
"""Other systems as people write them, by their name as a strategy."""


@dataclass(frozen=True)
class ScheduleRow:
    """A schedule and what it would yield.

    Attributes:
        strategy: "rra", "waa-c", "waa-m", "static" (batches nobody enters or leaves), or one of ``SYSTEM_NAMES``.
        encode_batch: New requests of one encoding, B_E; of a static schedule its batch; of another system the
            sequences on a replica at most.
        decode_steps: Decode iterations between two encodings, N_D.
        micro_batches: Parts of a batch that are in the pipeline at a time.
        tp: Tensor-parallel degree of the groups.
        tp_groups: Groups of ``tp`` GPUs that are one stage each; every other GPU is a stage of its own.
        encode_gpus: GPUs that encode; RRA: all.
        throughput_rps: Requests that complete a second.
        latency_s: Of a request whose output is the quantile of the bound.
        latency_high_s: The same where batches' work is at the far end of its range.
        cycle_s: From one encoding to the next.
        encode_s: One batch's way through the encoding stages.
        decode_s: A decode iteration.
        decode_batch: Sequences that are decoded at a time, B_D.
        memory_share: What the fullest GPU needs over what it has.
        stages: Of another system: pipeline stages of a replica.
        replicas: Of it.
        chunk_tokens: Of another system: tokens of a step at most; 0: no limit.
        prefill_cut: Degree, stages and replicas of what only prefills; what else is said is then of what only decodes.
    """

    strategy: str
    encode_batch: int
    decode_steps: int
    micro_batches: int
    tp: int
    tp_groups: int
    encode_gpus: int
    throughput_rps: float
    latency_s: float
    latency_high_s: float
    cycle_s: float
    encode_s: float
    decode_s: float
    decode_batch: float
    memory_share: float
    stages: int = 0
    replicas: int = 1
    chunk_tokens: int = 0
    prefill_cut: tuple[int, int, int] | None = None

    @property
    def words(self) -> str:
        """The schedule as people name it: "RRA, B_E = 52, N_D = 13, 1 x TP 4"."""
        if self.strategy in SYSTEM_NAMES:
            return self._system_words
        parts = [self.strategy.upper(), f"B_E = {self.encode_batch}"]
        if self.strategy == "static":
            parts = ["static", f"batch {self.encode_batch}"]
        if self.strategy == "rra":
            parts.append(f"N_D = {self.decode_steps}")
        if self.strategy.startswith("waa"):
            parts.append(f"B_m = {self.micro_batches}")
            parts.append(f"{self.encode_gpus} {'GPU encodes' if self.encode_gpus == 1 else 'GPUs encode'}")
        if self.tp_groups:
            parts.append(f"{self.tp_groups} x TP {self.tp}")
        return ", ".join(parts)

    @property
    def _system_words(self) -> str:
        """As in "vLLM v1, batch 64, steps of 2,048 tokens, 2 replicas of 2 stages of TP 4"."""
        parts = [SYSTEM_NAMES[self.strategy], f"batch {self.encode_batch:,}"]
        if self.chunk_tokens:
            parts.append(f"steps of {self.chunk_tokens:,} tokens")
        if self.micro_batches > self.stages:
            parts.append(f"prompts in {self.micro_batches} parts")
        if self.prefill_cut is None:
            return ", ".join([*parts, _cut_words(self.tp, self.stages, self.replicas)])
        parts.append(f"prompts on {_cut_words(*self.prefill_cut)}")
        return ", ".join([*parts, f"decodes on {_cut_words(self.tp, self.stages, self.replicas)}"])

    @property
    def family(self) -> tuple[str, int, int]:
        """What cannot be changed without loading weights anew, but for WAA's split: strategy, degree, groups."""
        return self.strategy, self.tp if self.tp_groups else 1, self.tp_groups


def _cut_words(tp: int, stages: int, replicas: int) -> str:
    """As in "2 replicas of 2 stages of TP 4"."""
    parts = [f"{many} {what}" for many, what in ((replicas, "replicas"), (stages, "stages")) if many > 1]
    return " of ".join([*parts, f"TP {tp}"] if tp > 1 or stages == 1 else parts)


@dataclass(frozen=True)
class Spread:
    """How far a schedule, left as it is, may be from what is said of it.

    Attributes:
        source: "lengths": requests drawn again from those that lengths were counted over; "costs": tables that are off.
        draws: How many there were.
        level: Share of them that lies within each interval.
        requests: That lengths were counted over; 0 for costs.
        throughput_rps: Ends of the interval.
        latency_s: Likewise.
        latency_high_s: Likewise.
        held_share: Share of the draws in which the bound was held; without a bound, in which memory held it.
    """

    source: str
    draws: int
    level: float
    requests: int
    throughput_rps: tuple[float, float]
    latency_s: tuple[float, float]
    latency_high_s: tuple[float, float]
    held_share: float


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
        cause: Why it lost; "" for the choice.
    """

    strategy: str
    tp: int
    best: ScheduleRow | None
    at_most_rps: float
    points: int
    evaluated: int
    cause: str

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

    constrained_latency_s: float
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
        changed: "mean", "sd" or "skewness".
        change: Relative change of mean or sd; absolute change of the skewness.
        mean_tokens: Of the outputs as they then are.
        sd_tokens: Likewise.
        skewness: Likewise.
        retained: The schedule left as it is; None: memory would no longer hold it.
        kept_held_s: Its latency that the bound is held against; infinite where it cannot run.
        is_satisfied: Whether the bound would still be met.
        replanned: The best schedule for the new lengths; None: none meets the bound.
        margin: How much tighter the bound must have been for the schedule chosen under it to hold the bound now;
            0: it holds; NaN: no tighter bound would have kept it.
        reload: Whether re-planning moves weights, not only batch sizes and phases.
    """

    changed: str
    change: float
    mean_tokens: float
    sd_tokens: float
    skewness: float
    retained: ScheduleRow | None
    kept_held_s: float
    is_satisfied: bool
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
        metadata: What is fixed, by name.
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
        breakpoints: Where another kind of schedule takes over.
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
    metadata: dict[str, str]
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
    breakpoints: tuple[Kink, ...] = ()
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
        constrained_latency_s: Its latency that the bound is held against.
        load_s: Seconds without service until it runs.
        storage: Where weights would be loaded from: "dram" or "ssd".
        repaid_s: After how long more requests have been served than without; infinite: never; NaN where it is not
            about throughput.
        cause: What speaks for it, in words.
    """

    row: ScheduleRow
    constrained_latency_s: float
    load_s: float
    storage: str
    repaid_s: float
    cause: str


@dataclass(frozen=True)
class Change:
    """What is to be done about a deployed schedule.

    Attributes:
        before: Lengths that it was planned for.
        after: Lengths as they are now.
        bound_s: Latency that must be held; infinite: none.
        margin: How much tighter the bound was taken for the new schedule.
        free_rps: What the best has under the bound itself, without a margin; 0: nothing meets it.
        retained: The deployed schedule under the new lengths; None: memory or seats would not hold it.
        kept_held_s: Its latency that the bound is held against; infinite where it cannot run.
        late_share: Share of requests that then take longer than the bound; of those that the bound was for at
            most one minus its quantile were.
        new: The best there is now, worth its change or not; None: nothing meets the bound.
        new_held_s: Its latency.
        load_s: Seconds without service until it runs: 0 unless weights move.
        made: Whether to change.
        repaid_s: After how long more requests have been served than without the change; infinite: never; NaN where
            it is not about throughput.
        cause: The reason, in words.
        elsewhere: What would be worth loading where that may not be done while serving; None: nothing.
    """

    before: LengthFacts
    after: LengthFacts
    bound_s: float
    margin: float
    free_rps: float
    retained: ScheduleRow | None
    kept_held_s: float
    late_share: float
    new: ScheduleRow | None
    new_held_s: float
    load_s: float
    made: bool
    repaid_s: float
    cause: str
    elsewhere: Elsewhere | None = None

    @property
    def is_satisfied(self) -> bool:
        """Whether the deployed schedule still meets the bound."""
        return self.retained is not None and self.kept_held_s <= self.bound_s

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
        started: The request from which on lengths are taken to be others.
        started_s: When that was.
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
    started: int
    started_s: float
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
        false_positive_rate: Probability of ever an alarm while lengths do not change.
        planned: The schedule that ran first.
        planned_lengths: What it was planned for.
        deployed: The one that runs at the end.
        adaptations: Alarms, and what came of them.
        matching: How much more a tested request is like the next one than like one fifty later: the larger rank
            correlation of both sides. Well above 0, alarms may be of that.
        evidence: At the end: what a unit staked on another change became; an alarm is given at 1 / false_alarms.
    """

    name: str
    live: str
    requests: int
    left_out: int
    bound_s: float
    false_positive_rate: float
    planned: ScheduleRow
    planned_lengths: LengthFacts
    deployed: ScheduleRow
    adaptations: tuple[Adaptation, ...]
    matching: float
    evidence: float

    @property
    def late(self) -> float:
        """Requests that would have taken longer than the bound, had the first schedule been left as it was."""
        ends = [*(one.started - 1 for one in self.adaptations[1:]), self.requests]
        spans = zip(self.adaptations, ends, strict=True) if self.adaptations else ()
        return sum(one.first_late_share * max(end - one.started + 1, 0) for one, end in spans)
