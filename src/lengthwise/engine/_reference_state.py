"""State of the reference engine: requests, steps, queues, replicas and their totals."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lengthwise.engine.kernel_layout import GAP_BINS, GAP_SMALLEST_EXPONENT, GAP_SUBBINS, SERIES_COLUMNS
from lengthwise.engine.setup import Setup
from lengthwise.engine.step_time import CostReader, StepCost


@dataclass
class Wait:
    """A request's place in a queue, and how long it has waited.

    Attributes:
        since_s: Start of the current wait; None on a replica.
        before_s: Seconds of the waits that have ended.
        key: Key in the queue, as last ranked; the smallest is admitted first.
        batch: Number of the batch that its bin became; 0: there are no bins.
    """

    since_s: float | None
    before_s: float = 0.0
    key: float = 0.0
    batch: int = 0

    def total_s(self, now_s: float) -> float:
        """Return the seconds of all waits up to a time."""
        return self.before_s + (0.0 if self.since_s is None else now_s - self.since_s)

    def overdue_at_s(self, max_wait_s: float) -> float:
        """Return when all waits add up to ``max_wait_s``; on a replica -inf if they do, else inf."""
        if self.since_s is None:
            return -math.inf if self.before_s >= max_wait_s else math.inf
        return self.since_s + (max_wait_s - self.before_s)

    def end(self, now_s: float) -> None:
        """End the current wait."""
        self.before_s, self.since_s = self.total_s(now_s), None


@dataclass(frozen=True)
class Admission:
    """The last admission of a request: its number among all, and the tokens that were generated before it."""

    number: int = -1
    generated: int = 0


@dataclass(frozen=True)
class LastPreemption:
    """The last preemption of a request: its number among all, and the blocks that it left in a prefix cache.

    Attributes:
        number: 0: it was never preempted.
        cached_blocks: Full blocks of computed tokens.
        freed_before_cached: Blocks that the replica had released before the cached ones.
        replica: Number of the replica.
    """

    number: int = 0
    cached_blocks: int = 0
    freed_before_cached: int = 0
    replica: int = -1


@dataclass
class Transfer:
    """The move of a prefilled request to another replica: ``blocks`` wait on ``source``; 0: fetched or freed."""

    source: Replica
    blocks: int

    def release(self) -> None:
        """Free the blocks on their replica, unless that has happened."""
        if self.blocks:
            self.source.free += self.blocks
            self.source.freed_blocks += self.blocks
            self.source.pending = True
            self.blocks = 0


@dataclass(eq=False)
class Request:
    """A request that has entered; see ``kernel_layout.slot_t``.

    ``prefilled`` counts the context's computed tokens while it is not ``decoding``; ``swapped``: its cache is in host
    memory. ``return_number`` grows with each return from a step; it breaks ties between victims.
    """

    index: int
    arrival_s: float
    prompt: int
    output: int
    wait: Wait
    generated: int = 0
    prefilled: int = 0
    last_token_s: float | None = None
    decoding: bool = False
    swapped: bool = False
    blocks: int = 0
    return_number: int = 0
    admission: Admission = Admission()
    last_preemption: LastPreemption = LastPreemption()
    transfer: Transfer | None = None

    @property
    def context(self) -> int:
        """Return the tokens that must be in the cache before the next one."""
        return self.prompt + self.generated

    def queue_order(self) -> tuple[float, int]:
        """Return the key of a queue; requests of equal rank go by their number."""
        return self.wait.key, self.index


@dataclass(eq=False)
class Step:
    """A step that is being formed or is in flight; ``paused`` decodes accompany its prompts and are not computed."""

    start_s: float
    end_s: float = 0.0
    decodes: list[Request] = field(default_factory=list)
    prompts: list[tuple[Request, int]] = field(default_factory=list)
    paused: list[Request] = field(default_factory=list)
    swap_s: float = 0.0
    short_of_blocks: bool = False
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
    """Waiting requests, and bins that collect arrivals; ``overdue_at_s`` is when the next has waited ``max_wait_s``."""

    waiting: list[Request]
    bins: list[list[Request]]
    overdue_at_s: float = math.inf

    @property
    def first(self) -> Request:
        """Return the request that is admitted next."""
        return min(self.waiting, key=Request.queue_order)

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
        round_steps: The marked step and those started after it; a round ends when the marked step has ended.
        freed_blocks: Blocks freed so far, less those taken back from the prefix cache.
        incoming: Requests in transfer to this replica, with the times at which they end.
        totals: Sums over its steps, a record of ``kernel_layout.replica_t``.
    """

    def __init__(self, setup: Setup, number: int, queue: Queue, histogram: Any) -> None:
        self.s, self.number, self.queue, self.free = setup, number, queue, setup.params.total_blocks
        self.cost = CostReader(setup.deployment.cost, by_stage=setup.first_replica > 0)
        self.idle: list[Request] = []
        self.flights: list[Step] = []
        self.incoming: dict[Request, float] = {}
        self.round_steps: list[Step] = []
        self.freed_blocks = self.outstanding_tokens = self.steps_since_admit = self.ended_since_admit = 0
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
        """Return the requests with memory and a slot here, and those in transfer; not those of a step being formed."""
        in_flight = [q for s in self.flights for q in (*s.decodes, *s.paused, *(p for p, _ in s.prompts))]
        return self.idle + in_flight + list(self.incoming)

    def count_gap(self, gap_s: float, count: int) -> None:
        """Count ``count`` tokens, each ``gap_s`` after the previous token of its request."""
        self._histogram[gap_bin(gap_s)] += count
        self.totals["gaps"] += count
        self.totals["gap_sum_s"] += gap_s * count
        self.totals["gap_max_s"] = max(self.totals["gap_max_s"], gap_s)
        self.gaps.append((count, gap_s))

    def run_step(self, step: Step, cost: StepCost, kv_tokens: int) -> None:
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
        while end_s >= bins * row["series_bin_s"]:
            self.series[: bins // 2] = self.series[0::2] + self.series[1::2]
            self.series[bins // 2 :] = 0.0
            row["series_bin_s"] *= 2
        outputs = decodes + sum(q.prefilled + chunk == q.context for q, chunk in step.prompts)
        values = (busy_s, step.seqs * busy_s, waiting * busy_s, in_use * busy_s, prompt_tokens, outputs)
        self.series[int(end_s / row["series_bin_s"])] += values
        self.steps.append((self.number, decodes, prompts, prompt_tokens, in_use, waiting, step.start_s, end_s))


def gap_bin(gap_s: float) -> int:
    """Return the histogram bin of a gap: octaves in 128 equal parts, bin 0 below the smallest."""
    mantissa, exponent = math.frexp(gap_s)
    octave = exponent - 1 - GAP_SMALLEST_EXPONENT
    if octave < 0 or mantissa == 0:
        return 0
    return min(1 + octave * GAP_SUBBINS + int((mantissa - 0.5) * 2 * GAP_SUBBINS), GAP_BINS - 1)
