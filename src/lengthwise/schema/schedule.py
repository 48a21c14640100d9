"""Defines schedules under a latency bound: the choice, its alternatives, and its behaviour when lengths drift."""

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
"""Display names of other systems by their strategy name."""


@dataclass(frozen=True)
class ScheduleRow:
    """A schedule and its estimated performance."""

    strategy: str  # "rra", "waa-c", "waa-m", "static" (batches of fixed membership), or a key of ``SYSTEM_NAMES``
    # B_E, new requests per prefill; of static batching the batch size; of another system its max_num_seqs.
    prefill_batch: int
    decode_steps: int  # N_D, decode iterations between two prefills (RRA)
    micro_batches: int  # B_m, micro-batches of the decode pipeline (WAA, other systems)
    tp: int
    tp_groups: int  # groups of ``tp`` GPUs that are one stage each; every other GPU is a stage of its own
    prefill_gpus: int
    throughput_rps: float
    latency_s: float
    latency_high_s: float
    cycle_s: float
    prefill_s: float
    decode_s: float
    decode_batch: float  # B_D, mean number of sequences in a decode iteration
    memory_share: float
    stages: int = 0
    replicas: int = 1
    chunk_tokens: int = 0  # of another system: largest number of tokens in a step; 0: unlimited
    # (tp, stages, replicas) of separate prefill workers; the other fields then describe the decode workers.
    prefill_cut: tuple[int, int, int] | None = None

    @property
    def words(self) -> str:
        """Return a label such as "RRA, B_E = 52, N_D = 13" or "vLLM v1, batch 64, steps of 2,048 tokens, TP 4"."""
        if self.strategy in SYSTEM_NAMES:
            parts = [SYSTEM_NAMES[self.strategy], f"batch {self.prefill_batch:,}"]
            parts += [f"steps of {self.chunk_tokens:,} tokens"] if self.chunk_tokens else []
            parts += [f"prompts in {self.micro_batches} parts"] if self.micro_batches > self.stages else []
            split = _split_label(self.tp, self.stages, self.replicas)
            if self.prefill_cut is not None:
                split = f"prompts on {_split_label(*self.prefill_cut)}, decodes on {split}"
            return ", ".join([*parts, split])
        parts = [self.strategy.upper(), f"B_E = {self.prefill_batch}"]
        if self.strategy == "static":
            parts = ["static", f"batch {self.prefill_batch}"]
        if self.strategy == "rra":
            parts.append(f"N_D = {self.decode_steps}")
        if self.strategy.startswith("waa"):
            parts.append(f"B_m = {self.micro_batches}")
            parts.append(f"{self.prefill_gpus} {'GPU prefills' if self.prefill_gpus == 1 else 'GPUs prefill'}")
        if self.tp_groups:
            parts.append(f"{self.tp_groups} x TP {self.tp}")
        return ", ".join(parts)

    @property
    def family(self) -> tuple[str, int, int]:
        """Return (strategy, tp, groups). A change of the family, or of WAA's ``prefill_gpus``, reloads weights."""
        return self.strategy, self.tp if self.tp_groups else 1, self.tp_groups


def _split_label(tp: int, stages: int, replicas: int) -> str:
    parts = [f"{count} {noun}" for count, noun in ((replicas, "replicas"), (stages, "stages")) if count > 1]
    return " of ".join([*parts, f"TP {tp}"] if tp > 1 or stages == 1 else parts)


@dataclass(frozen=True)
class LatencyBound:
    """A bound on the latency of an output of ``tokens`` tokens."""

    limit_s: float  # infinite: none
    tokens: int
    level: float = 0.99  # the quantile of output lengths that ``tokens`` is, unless the user gives a fixed length
    worst_case: bool = True  # whether the bound limits ``latency_high_s`` rather than ``latency_s``


@dataclass(frozen=True)
class Spread:
    """Intervals of the performance of a fixed schedule, for one source of uncertainty."""

    source: str  # "lengths": other samples of the requests behind the distribution; "costs": errors of the tables
    draws: int
    level: float  # share of the draws within each interval
    requests: int  # requests behind the length distribution; 0 for costs
    throughput_rps: tuple[float, float]
    latency_s: tuple[float, float]
    latency_high_s: tuple[float, float]
    met_share: float  # share of the draws that meet the bound or, without a bound, fit in memory


@dataclass(frozen=True)
class Uncertainty:
    """Uncertainty by source. ``notes`` name uncertainty that is left out, and measurements that are extrapolated."""

    spreads: tuple[Spread, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ScheduleSide:
    """The best schedule of one strategy at one tensor-parallel degree (1: every GPU is a stage)."""

    strategy: str
    tp: int
    best: ScheduleRow | None  # the best schedule that meets the bound; None: none does
    # Upper bound of the throughput of all its schedules that meet the latency bound (see ``at_most_proved``).
    at_most_rps: float
    points: int
    evaluated: int
    cause: str

    @property
    def at_most_proved(self) -> bool:
        """Return whether ``at_most_rps`` is proved. For RRA, this requires that all of its schedules were estimated."""
        return self.strategy != "rra" or self.evaluated >= self.points


@dataclass(frozen=True)
class ScheduleSearch:
    """The search for a schedule: the result of each side, and a bound on the throughput of the optimum.

    ``evaluated`` of ``points`` schedules were estimated, in ``seconds``. The optimum has at most (1 + ``gap``) times
    the throughput of the chosen schedule, if the search's tolerances hold. RRA's short phases violate them: with RRA
    among the sides, the gap is approximate unless all schedules were evaluated.
    """

    sides: tuple[ScheduleSide, ...]
    evaluated: int
    points: int
    gap: float
    seconds: float


@dataclass(frozen=True)
class ScheduleParts:
    """A split of the GPUs into ``copies`` independent parts of ``gpus`` GPUs each. The remaining GPUs are idle."""

    gpus: int
    copies: int
    row: ScheduleRow  # the best schedule of one part

    @property
    def throughput_rps(self) -> float:
        """Return the throughput of all parts together."""
        return self.copies * self.row.throughput_rps

    @property
    def words(self) -> str:
        """Return a label such as "2 parts of 8 GPUs" or "4 GPUs alone"."""
        each = "1 GPU" if self.gpus == 1 else f"{self.gpus} GPUs"
        return f"{self.copies} parts of {each}" if self.copies > 1 else f"{each} alone"


@dataclass(frozen=True)
class FrontPoint:
    """A schedule on the Pareto front of its strategy, with the latency that the bound limits."""

    constrained_latency_s: float
    row: ScheduleRow
    band_rps: tuple[float, float] | None = None  # its throughput under errors of the cost tables; None: unknown


@dataclass(frozen=True)
class StaticBatching:
    """The largest static batch that meets the bound (None if no batch does), and the Pareto front of all batches."""

    best: ScheduleRow | None = None
    front: tuple[FrontPoint, ...] = ()


@dataclass(frozen=True)
class OtherSystem:
    """Estimated performance of another system on the same GPUs."""

    system: str
    best: ScheduleRow | None  # its best configuration under the bound; None: none meets the bound
    low_rps: float  # lower end of the 95 % interval of the best configuration's throughput; NaN without an interval
    high_rps: float
    configurations: int
    front: tuple[FrontPoint, ...]


@dataclass(frozen=True)
class Kink:
    """A latency bound at which the best kind of schedule changes."""

    bound_s: float
    words: str


@dataclass(frozen=True)
class DriftRow:
    """How the chosen schedule performs if output lengths have another distribution."""

    changed: str  # "mean", "sd" or "skewness"
    change: float  # relative change of mean or sd; absolute change of the skewness
    mean_tokens: float
    sd_tokens: float
    skewness: float
    retained: ScheduleRow | None  # the unchanged schedule; None: memory no longer suffices
    retained_latency_s: float  # the unchanged schedule's latency that the bound limits; infinite if it cannot run
    is_satisfied: bool
    replanned: ScheduleRow | None  # the best schedule for the new lengths; None: none meets the bound
    # Share by which a tighter bound would have led to a schedule that meets the bound now; 0: the chosen one meets it;
    # NaN: no tighter bound suffices.
    margin: float
    reload: bool  # whether re-planning moves weights, and not only batch sizes and phases


@dataclass(frozen=True)
class Redeployment:
    """The seconds that reloading the weights takes, from DRAM and from SSD, and the source of these rates."""

    dram_s: float
    ssd_s: float
    source: str


@dataclass(frozen=True)
class TimelineBar:
    """The time that one micro-batch spends on one stage."""

    stage: int
    start_s: float
    end_s: float
    is_prefill: bool
    micro_batch: int


@dataclass(frozen=True)
class Timeline:
    """What each stage does over time. ``stages[i]`` is the label of stage i."""

    stages: tuple[str, ...] = ()
    bars: tuple[TimelineBar, ...] = ()


@dataclass(frozen=True)
class SchedulePlan:
    """The result of ``lengthwise schedule``."""

    name: str
    metadata: dict[str, str]
    bound: LatencyBound
    chosen: ScheduleRow
    search: ScheduleSearch
    static: StaticBatching = StaticBatching()
    front: tuple[tuple[str, tuple[FrontPoint, ...]], ...] = ()
    breakpoints: tuple[Kink, ...] = ()
    drift: tuple[DriftRow, ...] = ()
    redeploy: Redeployment = Redeployment(math.nan, math.nan, "")
    timeline: Timeline = Timeline()
    uncertainty: Uncertainty = Uncertainty()
    others: tuple[OtherSystem, ...] = ()
    threshold: float | None = None  # largest share by which a batch deviates from its mean; None: it is not resized
    parts: ScheduleParts | None = None  # a split that serves more than a schedule of all GPUs; None: there is none


@dataclass(frozen=True)
class LengthFacts:
    """Moments of the prompt and output lengths in tokens, and the output length to which the bound applies."""

    prompt_mean: float
    prompt_sd: float
    output_mean: float
    output_sd: float
    output_skewness: float
    quantile_tokens: int


@dataclass(frozen=True)
class Elsewhere:
    """A better schedule that needs a reload of the weights."""

    row: ScheduleRow
    constrained_latency_s: float
    load_s: float  # seconds without service until it runs
    storage: str  # source of the weights: "dram" or "ssd"
    # Time after which more requests are served than without the reload; inf: never; NaN if throughput is not the gain.
    repaid_s: float
    cause: str


@dataclass(frozen=True)
class Change:
    """The decision whether to replace a deployed schedule after lengths have changed."""

    before: LengthFacts  # lengths for which the schedule was planned
    after: LengthFacts  # lengths now
    bound_s: float  # latency bound; infinite: none
    margin: float  # share by which the bound was tightened to choose the new schedule
    free_rps: float  # throughput of the best schedule under the bound without the margin; 0: none meets it
    retained: ScheduleRow | None  # the deployed schedule under new lengths; None: memory or batch no longer suffices
    retained_latency_s: float  # its latency that the bound limits; infinite if it cannot run
    late_share: float  # share of requests that exceed the bound under the deployed schedule
    new: ScheduleRow | None  # the best schedule now, even if it is not worth the change; None: none meets the bound
    new_latency_s: float  # its latency that the bound limits
    load_s: float  # seconds without service until it runs: 0 unless weights move
    made: bool  # whether the deployed schedule is replaced
    # Time after which more requests are served than without the change; inf: never; NaN if throughput is not the gain.
    repaid_s: float
    cause: str  # the reason, in words
    elsewhere: Elsewhere | None = None  # a schedule worth a reload, if that were allowed while serving; None: none

    @property
    def is_satisfied(self) -> bool:
        """Return whether the deployed schedule still meets the bound."""
        return self.retained is not None and self.retained_latency_s <= self.bound_s


@dataclass(frozen=True)
class Adaptation:
    """An alarm of changed lengths and its outcome."""

    request: int  # number (from 1) of the request at which the change was certain
    at_s: float
    started: int  # number of the request from which lengths count as changed
    started_s: float
    requests: int
    sides: tuple[str, ...]  # "prompts", "outputs" or both
    evidence: dict[str, float]  # by side, the betting martingale: the value of one unit bet on the change
    first: bool  # True: the alarm; False: a new decision on the same change, estimated from more requests
    change: Change
    first_latency_s: float  # latency (which the bound limits) of the first schedule under the new lengths, unchanged
    first_late_share: float  # share of requests that would exceed the bound


@dataclass(frozen=True)
class Watched:
    """The result of watching a stream of requests: how the schedule adapts when lengths change."""

    name: str
    live: str  # name of the stream of requests
    requests: int
    left_out: int  # requests of the stream that did not finish
    bound_s: float  # latency bound; infinite: none
    false_positive_rate: float  # probability of any alarm while lengths do not change
    planned: ScheduleRow
    planned_lengths: LengthFacts
    deployed: ScheduleRow
    adaptations: tuple[Adaptation, ...]
    # Rank correlation between neighbouring tested requests, less that between requests 50 apart; the larger of prompts
    # and outputs. Values well above 0 may cause false alarms.
    matching: float
    evidence: float  # at the end: the value of one unit bet on another change; an alarm needs 1 / false_positive_rate

    @property
    def late(self) -> float:
        """Return the expected number of requests that would exceed the bound under the first schedule, unchanged."""
        ends = [*(one.started - 1 for one in self.adaptations[1:]), self.requests]
        spans = zip(self.adaptations, ends, strict=True) if self.adaptations else ()
        return sum(one.first_late_share * max(end - one.started + 1, 0) for one, end in spans)
