"""State of the reference engine: requests, steps, queues, replicas and their totals."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lengthwise.engine.kernel_layout import GAP_BINS, GAP_SMALLEST_EXPONENT, GAP_SUBBINS, SERIES_COLUMNS
from lengthwise.engine.setup import Setup
from lengthwise.engine.step_time import CostReader, StepCost


@dataclass(eq=False)
class Request:
    """A request that has entered; see ``kernel_layout.slot_t``."""

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
    charged_tokens: float = 0.0
    batch: int = 0
    generated_at_admission: int = 0
    cached_blocks: int = 0
    cached_mark: int = 0
    cached_on: int = -1
    key: float = 0.0
    source: Replica | None = None
    """Replica that prefilled the request, where ``transfer_blocks`` wait to be fetched; None: it does not move."""
    transfer_blocks: int = 0
    transfer_end_s: float = math.inf

    @property
    def context(self) -> int:
        """Return the tokens that must be in the cache before the next one."""
        return self.prompt + self.generated


@dataclass(eq=False)
class Step:
    """A step that is being formed or is in flight; ``paused`` decodes accompany its prompts and are not computed."""

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
        """Return the number of computed sequences."""
        return len(self.decodes) + len(self.prompts)

    @property
    def prompt_tokens(self) -> int:
        """Return the prompt tokens of the step."""
        return sum(chunk for _, chunk in self.prompts)


@dataclass(eq=False)
class Queue:
    """Waiting requests, and bins that collect arrivals; ``starvation_s`` is when the next has waited ``max_wait_s``."""

    waiting: list[Request]
    bins: list[list[Request]]
    starvation_s: float = math.inf

    @property
    def length(self) -> int:
        """Return the number of requests that are not yet admitted."""
        return len(self.waiting) + sum(map(len, self.bins))


class Replica:
    """A replica: its requests, the steps in its pipeline, and its totals.

    Attributes:
        s: Setup of its side.
        queue: Its queue, or the central one.
        idle: Residents that are not in flight.
        flights: Steps in the pipeline, the oldest first.
        round_steps: Last step of the micro-batch whose turns delimit rounds, and the steps that started after it.
        incoming: Requests in transfer to this replica.
        totals: Sums over its steps, a record of ``kernel_layout.replica_t``.
    """

    def __init__(self, setup: Setup, number: int, queue: Queue, histogram: Any) -> None:
        self.s, self.number, self.queue, self.free = setup, number, queue, setup.params.total_blocks
        self.cost = CostReader(setup.deployment.cost, by_stage=setup.first > 0)
        self.idle: list[Request] = []
        self.flights: list[Step] = []
        self.incoming: list[Request] = []
        self.round_steps: list[Step] = []
        self.total_released = self.tokens = self.steps_since = self.finished_since = 0
        self.phase_steps = self.phase_rounds = self.steps_since_check = 0
        self.pending = self.check_preemption = False
        self.sends_until_s = self.receives_until_s = 0.0
        self.totals = setup.blank_replicas()[0]
        self.series = np.zeros((setup.params.series_bins, len(SERIES_COLUMNS)))
        self.steps: list[tuple[Any, ...]] = []
        self.gaps: list[tuple[int, float]] = []
        self._histogram = histogram
        self._stage_free_s = [0.0] * setup.params.pp

    @property
    def running(self) -> list[Request]:
        """Return the requests with memory and a slot on this replica, including those in transfer to it."""
        in_flight = [q for s in self.flights for q in (*s.decodes, *s.paused, *(p for p, _ in s.prompts))]
        return self.idle + in_flight + self.incoming

    def count_gap(self, gap_s: float, count: int) -> None:
        """Count ``count`` tokens, each ``gap_s`` after the previous token of its request."""
        self._histogram[gap_bin(gap_s)] += count
        self.totals["gaps"] += count
        self.totals["gap_sum_s"] += gap_s * count
        self.totals["gap_max_s"] = max(self.totals["gap_max_s"], gap_s)
        self.gaps.append((count, gap_s))

    def record(self, step: Step, cost: StepCost, kv_tokens: int) -> None:
        """Send a step through the pipeline, set its end, and add it to the totals, time series and step log."""
        end_s, row = step.start_s, self.totals
        for p, stage_s in enumerate(cost.stages_s):
            end_s = max(end_s, self._stage_free_s[p]) + stage_s
            self._stage_free_s[p] = end_s
        step.end_s = float(end_s)
        decodes, prompts, prompt_tokens = len(step.decodes), len(step.prompts), step.prompt_tokens
        in_use, waiting = self.s.params.total_blocks - self.free, len(self.queue.waiting)
        busy_s = end_s - max(step.start_s, row["busy_until_s"])
        row["busy_until_s"] = end_s
        row["busy_s"] += busy_s
        row["kv_block_s"] += in_use * busy_s
        row["steps"] += 1
        row["tokens"] += decodes + prompt_tokens
        row["pairs"] += kv_tokens
        for q, chunk in step.prompts:
            row["pairs"] += chunk * q.prefilled + chunk * (chunk + 1) / 2
        row["kv_read"] += kv_tokens
        row["swap_s"] += step.swap_s
        for part in (
            "layer_s", "comm_s", "prefill_attention_s", "decode_attention_s", "host_s", "head_s", "first_s", "send_s",
        ):  # fmt: skip
            row[part] += getattr(cost, part)
        bins = len(self.series)
        while end_s >= bins * row["bin_s"]:
            self.series[: bins // 2] = self.series[0::2] + self.series[1::2]
            self.series[bins // 2 :] = 0.0
            row["bin_s"] *= 2
        outputs = decodes + sum(q.prefilled + chunk == q.context for q, chunk in step.prompts)
        values = (busy_s, step.seqs * busy_s, waiting * busy_s, in_use * busy_s, prompt_tokens, outputs)
        self.series[int(end_s / row["bin_s"])] += values
        self.steps.append((self.number, decodes, prompts, prompt_tokens, in_use, waiting, step.start_s, end_s))


def gap_bin(gap_s: float) -> int:
    """Return the histogram bin of a gap: octaves in 128 equal parts, bin 0 below the smallest."""
    mantissa, exponent = math.frexp(gap_s)
    octave = exponent - 1 - GAP_SMALLEST_EXPONENT
    if octave < 0 or mantissa == 0:
        return 0
    return min(1 + octave * GAP_SUBBINS + int((mantissa - 0.5) * 2 * GAP_SUBBINS), GAP_BINS - 1)
