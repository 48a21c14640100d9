"""The cost of a step in plain Python: what the compiled lookup must agree with to the last bit."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from lengthwise.schema.cost_tables import MERGED, CostTables, Floats, grid_value


@dataclass(frozen=True)
class StepCost:
    """One layer's seconds, what comes once a step, and the seconds of each pipeline stage."""

    layer_s: float
    comm_s: float
    prefill_attention_s: float
    decode_attention_s: float
    host_s: float
    head_s: float
    first_s: float
    send_s: float
    stages_s: list[float]


class CostReader:
    """Reads cost tables one step at a time."""

    def __init__(self, cost: CostTables) -> None:
        self._cost = cost
        self._axis = [grid_value(i) for i in range(max(*cost.prefill_s.shape, *cost.decode_s.shape))]

    def step(
        self, decodes: int, kv_tokens: int, prompts: list[tuple[int, int]], swap_s: float = 0.0
    ) -> StepCost:
        """The cost of ``decodes`` decodes over ``kv_tokens`` and of ``prompts`` (chunk, context before it)."""
        cost = self._cost
        tokens = decodes + sum(chunk for chunk, _ in prompts)
        seqs = decodes + len(prompts)
        layer, comm = _row(cost.layer_s, tokens), _row(cost.comm_s, tokens)
        first, send = _row(cost.first_s, tokens), _row(cost.send_s, tokens)
        head, host = _row(cost.head_s, seqs), _row(cost.host_s, seqs)
        prefill = self._prefill(prompts)
        decode = self._decode(decodes, kv_tokens, len(prompts))
        stages = []
        last = len(cost.stage_layers) - 1
        for p, layers in enumerate(cost.stage_layers):
            stage = float(layers) * (layer + comm + prefill + decode)
            if p == 0:
                stage += first + host + swap_s
            stage += head if p == last else send
            stages.append(stage)
        return StepCost(layer, comm, prefill, decode, host, head, first, send, stages)

    def return_steps(self, tokens: int, swapped_s: float | None, decodes: int, kv_tokens: int) -> float:
        """A layer's time to compute ``tokens`` again, or all layers' to swap, over that of a decode step."""
        cost = self._cost
        seqs = max(1, decodes)
        step = _row(cost.layer_s, seqs) + _row(cost.comm_s, seqs) + self._decode(decodes, kv_tokens, 0)
        if swapped_s is not None:
            return swapped_s / (float(sum(cost.stage_layers)) * step)
        prompts = [(tokens, 0)] if tokens > 0 else []
        return (_row(cost.layer_s, tokens) + _row(cost.comm_s, tokens) + self._prefill(prompts)) / step

    def _prefill(self, prompts: list[tuple[int, int]]) -> float:
        rule = self._cost.rule
        if not prompts:
            return 0.0
        if rule.kind != MERGED:
            total = 0.0
            for chunk, context in prompts:
                total += self._bilinear(self._cost.prefill_s, chunk, context)
            return total
        steps = sum(-(-context // rule.step_tokens) for _, context in prompts)
        chunk = int(sum(chunk * chunk for chunk, _ in prompts) ** 0.5 + 0.5)
        return (rule.merge_factor if len(prompts) > 1 else 1.0) * _stepped(self._cost.prefill_s, chunk, steps)

    def _decode(self, decodes: int, kv_tokens: int, prompts: int) -> float:
        rule = self._cost.rule
        if decodes == 0:
            return 0.0
        if rule.kind != MERGED:
            seconds = self._bilinear(self._cost.decode_s, decodes, kv_tokens)
            if prompts > 0 and self._cost.beside_prompts is not None:
                seconds *= self._bilinear(self._cost.beside_prompts, decodes, kv_tokens)
            return seconds
        column = -(-(kv_tokens // decodes) // rule.step_tokens)
        return (rule.merge_factor if decodes > 1 else 1.0) * _stepped(self._cost.decode_s, decodes, column)

    def _bilinear(self, table: Floats, x: int, y: int) -> float:
        i, u = self._cell(x, table.shape[0])
        j, v = self._cell(y, table.shape[1])
        low = table[i, j] + v * (table[i, j + 1] - table[i, j])
        high = table[i + 1, j] + v * (table[i + 1, j + 1] - table[i + 1, j])
        return float(low + u * (high - low))

    def _cell(self, value: int, points: int) -> tuple[int, float]:
        index = min(bisect.bisect_right(self._axis, value) - 1, points - 2)
        low, high = self._axis[index], self._axis[index + 1]
        return index, (value - low) / (high - low)


def _row(table: Floats, index: int) -> float:
    last = len(table) - 1
    if index <= last:
        return float(table[index])
    span = min(256, last)
    return float(table[-1] + (index - last) * ((table[-1] - table[-1 - span]) / max(span, 1)))


def _stepped(table: Floats, i: int, j: int) -> float:
    return float(table[min(i, table.shape[0] - 1), min(j, table.shape[1] - 1)])


__all__ = ["CostReader", "StepCost"]
