"""What the reference moves about: a request, a step, a replica."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lengthwise.engine.kernel_layout import (
    GAP_BINS,
    GAP_SMALLEST_EXPONENT,
    GAP_SUBBINS,
    SERIES_COLUMNS,
    gap_t,
    replica_t,
    step_t,
)
from lengthwise.engine.outcome import Outcome, ending_s
from lengthwise.schema.errors import InternalError

if TYPE_CHECKING:
    from lengthwise.engine.setup import Setup
    from lengthwise.engine.step_time import CostReader


@dataclass(eq=False)
class Request:
    index: int
    arrival_s: float
    prompt: int
    output: int
    priority: int
    tenant: int
    generated: int = 0
    prefilled: int = 0
    blocks: int = 0
    admission: int = -1
    eviction: int = 0
    slot_index: int = 0
    last_token_s: float | None = None
    decoding: bool = False
    swapped: bool = False
    waiting: bool = True
    queued_s: float = 0.0
    queued_for_s: float = 0.0
    charged: float = 0.0
    batch: int = 0
    entered: int = 0
    retained: int = 0
    kept_mark: int = 0
    kept_on: int = -1
    key: float = 0.0
    home: Replica | None = None
    reserved: int = 0
    arrives_s: float = math.inf

    @property
    def context(self) -> int:
        """Tokens that must be in the cache before the next one can come."""
        return self.prompt + self.generated

    @property
    def home_replica(self) -> Replica:
        """Where it was prefilled, if it decodes elsewhere: there ``held`` blocks wait to be fetched."""
        if self.home is None:
            raise InternalError(f"request {self.index} was handed over by nobody")
        return self.home


@dataclass(eq=False)
class Step:
    start_s: float
    end_s: float = 0.0
    decodes: list[Request] = field(default_factory=list)
    prompts: list[tuple[Request, int]] = field(default_factory=list)
    paused: list[Request] = field(default_factory=list)
    swap_s: float = 0.0
    evicted: bool = False
    flags: int = 0

    @property
    def seqs(self) -> int:
        return len(self.decodes) + len(self.prompts)

    @property
    def prompt_tokens(self) -> int:
        return sum(chunk for _, chunk in self.prompts)


@dataclass(eq=False)
class Queue:
    """Who waits, and the bins in which arrivals gather first; ``overdue_s``: when the next has waited too long."""

    waiting: list[Request]
    bins: list[list[Request]]
    overdue_s: float = math.inf

    @property
    def length(self) -> int:
        """Everybody who is not yet admitted."""
        return len(self.waiting) + sum(map(len, self.bins))


@dataclass(eq=False)
class Replica:
    s: Setup
    number: int
    free: int
    line: Queue
    meter: Meter
    cost: CostReader
    idle: list[Request] = field(default_factory=list)
    flights: list[Step] = field(default_factory=list)
    total_released: int = 0
    tokens: int = 0
    touched: bool = False
    decide: bool = False
    undecided: int = 0
    steps_since: int = 0
    ended_since: int = 0
    phase_steps: int = 0
    phase_rounds: int = 0
    since: list[Step] = field(default_factory=list)
    """The last step of the micro-batch whose turns are the rounds, and those that began after it."""
    incoming: list[Request] = field(default_factory=list)
    sends_until_s: float = 0.0
    receives_until_s: float = 0.0

    @property
    def queue(self) -> list[Request]:
        """Who waits for this replica, or over a central queue for any."""
        return self.line.waiting

    @property
    def num_running(self) -> list[Request]:
        """Every request that holds memory and a seat here, those on their way here too."""
        flying = [q for s in self.flights for q in (*s.decodes, *s.paused, *(p for p, _ in s.prompts))]
        return self.idle + flying + self.incoming


if TYPE_CHECKING:
    from lengthwise.engine.setup import Setup
    from lengthwise.engine.step_time import StepCost


def gap_bin(gap_s: float) -> int:
    """The bin of a gap: octaves in 128 equal parts, bin 0 below the smallest."""
    mantissa, exponent = math.frexp(gap_s)
    octave = exponent - 1 - GAP_SMALLEST_EXPONENT
    if octave < 0 or mantissa == 0:
        return 0
    return min(1 + octave * GAP_SUBBINS + int((mantissa - 0.5) * 2 * GAP_SUBBINS), GAP_BINS - 1)


class Meter:
    """Counts what one replica does."""

    def __init__(self, setup: Setup, histogram: Any) -> None:
        self._s = setup
        self._histogram = histogram
        self.row = setup.replica_rows[0].copy()
        self.series = np.zeros((setup.series_bins, len(SERIES_COLUMNS)))
        self.steps: list[tuple[Any, ...]] = []
        self.gaps: list[tuple[float, int]] = []
        self._stage_free_s = [0.0] * setup.pp

    def gap(self, gap_s: float, count: int) -> None:
        """Counts ``count`` tokens that each came ``gap_s`` after the one before."""
        self._histogram[gap_bin(gap_s)] += count
        self.row["gaps"] += count
        self.row["gap_sum_s"] += gap_s * count
        self.row["gap_max_s"] = max(self.row["gap_max_s"], gap_s)
        self.gaps.append((gap_s, count))

    def launch(
        self,
        replica: int,
        step: Any,
        cost: StepCost,
        kv_tokens: int,
        prompts: list[tuple[int, int]],
        free_blocks: int,
        waiting: int,
    ) -> float:
        """Sends a step through the pipeline and books it; returns when its last stage ends."""
        end_s = step.start_s
        for p, stage_s in enumerate(cost.stages_s):
            end_s = max(end_s, self._stage_free_s[p]) + stage_s
            self._stage_free_s[p] = end_s
        held = self._s.total_blocks - free_blocks
        busy_s = end_s - max(step.start_s, self.row["busy_until_s"])
        self.row["busy_until_s"] = end_s
        self._sums(step, cost, kv_tokens, prompts)
        self.row["busy_s"] += busy_s
        self.row["kv_block_s"] += held * busy_s
        seqs, tokens = step.seqs, step.prompt_tokens
        outputs = len(step.decodes) + sum(q.prefilled + chunk == q.context for q, chunk in step.prompts)
        self._bin(end_s, (busy_s, seqs * busy_s, waiting * busy_s, held * busy_s, tokens, outputs))
        self.steps.append((step.start_s, end_s, replica, len(step.decodes), len(step.prompts), tokens, held, waiting))
        return float(end_s)

    def _sums(self, step: Any, cost: StepCost, kv_tokens: int, prompts: list[tuple[int, int]]) -> None:
        row = self.row
        row["steps"] += 1
        row["tokens"] += len(step.decodes) + step.prompt_tokens
        row["pairs"] += kv_tokens
        for chunk, context in prompts:
            row["pairs"] += chunk * context + chunk * (chunk + 1) / 2
        row["kv_read"] += kv_tokens
        row["layer_s"] += cost.layer_s
        row["comm_s"] += cost.comm_s
        row["prefill_attention_s"] += cost.prefill_attention_s
        row["decode_attention_s"] += cost.decode_attention_s
        row["host_s"] += cost.host_s
        row["head_s"] += cost.head_s
        row["first_s"] += cost.first_s
        row["send_s"] += cost.send_s
        row["swap_s"] += step.swap_s

    def _bin(self, end_s: float, values: tuple[float, ...]) -> None:
        bins = len(self.series)
        while end_s >= bins * self.row["bin_s"]:
            self.series[: bins // 2] = self.series[0::2] + self.series[1::2]
            self.series[bins // 2 :] = 0.0
            self.row["bin_s"] *= 2
        self.series[int(end_s / self.row["bin_s"])] += values


def outcome_of(
    meters: list[Meter], arrival_s: Any, results: Any, histogram: Any, last_s: float, limit_s: float
) -> Outcome:
    """One outcome from all replicas' books."""
    replicas = np.array([m.row for m in meters], dtype=replica_t)
    return Outcome(
        arrival_s=arrival_s,
        results=results,
        replicas=replicas,
        series=np.stack([m.series for m in meters]),
        histogram=histogram,
        steps=np.array([row for m in meters for row in m.steps], dtype=step_t),
        gaps=np.array([row for m in meters for row in m.gaps], dtype=gap_t),
        end_s=ending_s(last_s, limit_s, results, replicas),
    )
