"""The reference's books: sums, series and logs of one replica."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from lengthwise.engine._layout import (
    GAP_BINS,
    GAP_SMALLEST_EXPONENT,
    GAP_SUBBINS,
    SERIES_COLUMNS,
    gap_t,
    replica_t,
    step_t,
)
from lengthwise.engine._outcome import Outcome, ending_s

if TYPE_CHECKING:
    from lengthwise.engine._cost_reading import StepCost
    from lengthwise.engine._setup import Setup


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
        self.steps.append(
            (step.start_s, end_s, replica, len(step.decodes), len(step.prompts), tokens, held, waiting)
        )
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
