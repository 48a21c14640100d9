"""The seconds of one step of a deployment, for whoever lets time pass outside of a simulation."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lengthwise.schema.cost_tables import MERGED, CostTables, Floats, grid_value


@dataclass(frozen=True)
class StepCost:
    """All layers' seconds by part, what comes once a step, and the seconds of each pipeline stage."""

    layer_s: float
    comm_s: float
    prefill_attention_s: float
    decode_attention_s: float
    host_s: float
    head_s: float
    first_s: float
    send_s: float
    stages_s: list[float]


@dataclass(frozen=True)
class _Read:
    """What one set of tables says of a step: a layer's seconds by part, and what comes once."""

    layer: float
    comm: float
    prefill: float
    decode: float
    host: float
    head: float
    first: float
    send: float

    def stage_s(self, layers: float, p: int, last: int, swap_s: float) -> float:
        """Seconds of stage ``p`` of so many layers."""
        stage = layers * (self.layer + self.comm + self.prefill + self.decode)
        if p == 0:
            stage += self.first + self.host + swap_s
        return stage + (self.head if p == last else self.send)


class CostReader:
    """Reads cost tables one step at a time; ``by_stage`` sums stage by stage where all are alike, too."""

    def __init__(self, cost: CostTables, *, by_stage: bool = False) -> None:
        self._cost = cost
        self._by_stage = by_stage
        self._axis = [grid_value(i) for i in range(max(*cost.prefill_s.shape, *cost.decode_s.shape))]
        self._other = None if cost.other is None else CostReader(cost.other)

    def step(self, decodes: int, kv_tokens: int, prompts: list[tuple[int, int]], swap_s: float = 0.0) -> StepCost:
        """The cost of ``decodes`` decodes over ``kv_tokens`` and of ``prompts`` (chunk, context before it)."""
        one = self.read(decodes, kv_tokens, prompts)
        if self._other is not None:
            return self._of_two(one, self._other.read(decodes, kv_tokens, prompts), swap_s)
        if self._by_stage:
            return self._of_two(one, one, swap_s)
        layers, last = float(self._cost.stage_layers.sum()), len(self._cost.stage_layers) - 1
        stages = [one.stage_s(float(n), p, last, swap_s) for p, n in enumerate(self._cost.stage_layers)]
        return StepCost(
            layers * one.layer,
            layers * one.comm,
            layers * one.prefill,
            layers * one.decode,
            one.host,
            one.head,
            one.first,
            last * one.send,
            stages,
        )

    def _of_two(self, one: _Read, other: _Read, swap_s: float) -> StepCost:
        """The same where stages are of two degrees; sums are made stage by stage."""
        last = len(self._cost.stage_layers) - 1
        layer = comm = prefill = decode = send = 0.0
        stages = []
        marks = [0] * (last + 1) if self._cost.stage_other is None else self._cost.stage_other.tolist()
        reads = [other if mark else one for mark in marks]
        for p, (n, read) in enumerate(zip(self._cost.stage_layers, reads, strict=True)):
            stages.append(read.stage_s(float(n), p, last, swap_s))
            layer += float(n) * read.layer
            comm += float(n) * read.comm
            prefill += float(n) * read.prefill
            decode += float(n) * read.decode
            send += read.send if p < last else 0.0
        host, head, first = reads[0].host, reads[-1].head, reads[0].first
        return StepCost(layer, comm, prefill, decode, host, head, first, send, stages)

    def read(self, decodes: int, kv_tokens: int, prompts: list[tuple[int, int]]) -> _Read:
        """What these tables alone say of a step."""
        cost = self._cost
        tokens = decodes + sum(chunk for chunk, _ in prompts)
        seqs = decodes + len(prompts)
        layer, comm = _row(cost.layer_s, tokens), _row(cost.comm_s, tokens)
        first, send = _row(cost.first_s, tokens), _row(cost.send_s, tokens)
        head, host = _row(cost.head_s, seqs), _row(cost.host_s, seqs)
        lengths = [context + chunk for chunk, context in prompts]
        keys = kv_tokens + sum(lengths)
        own = sum(chunk * length for (chunk, _), length in zip(prompts, lengths, strict=True))
        prefill = self._prefill(prompts) + self._masked(tokens - decodes, keys, own)
        decode = self._decode(decodes, kv_tokens, len(prompts)) + self._masked(decodes, keys, kv_tokens)
        return _Read(layer, comm, prefill, decode, host, head, first, send)

    def return_steps(self, tokens: int, swapped_s: float | None, decodes: int, kv_tokens: int) -> float:
        """A layer's time to compute ``tokens`` again, or all layers' to swap, over that of a decode step."""
        cost = self._cost
        seqs = max(1, decodes)
        step = _row(cost.layer_s, seqs) + _row(cost.comm_s, seqs)
        step += self._decode(decodes, kv_tokens, 0) + self._masked(decodes, kv_tokens, kv_tokens)
        if swapped_s is not None:
            return swapped_s / (float(sum(cost.stage_layers)) * step)
        prompts = [(tokens, 0)] if tokens > 0 else []
        return (_row(cost.layer_s, tokens) + _row(cost.comm_s, tokens) + self._prefill(prompts)) / step

    def _masked(self, queries: int, keys: int, own: int) -> float:
        """Seconds of the pairs of queries and keys that are not ``own`` pairs of one sequence; 0 without queries."""
        if queries == 0:
            return 0.0
        return self._cost.masked_s * (queries * keys - own)

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
        return (rule.merge_factor if len(prompts) > 1 else 1.0) * _step_lookup(self._cost.prefill_s, chunk, steps)

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
        return (rule.merge_factor if decodes > 1 else 1.0) * _step_lookup(self._cost.decode_s, decodes, column)

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


def _step_lookup(table: Floats, i: int, j: int) -> float:
    return float(table[min(i, table.shape[0] - 1), min(j, table.shape[1] - 1)])


StepTime = Callable[[int, int, Sequence[tuple[int, int]]], float]
"""Seconds of a step of (decodes, KV tokens that they read, prompts as (chunk, context before it))."""


def step_time(cost: CostTables) -> StepTime:
    """What a step takes through all pipeline stages, as the engine reads the tables."""
    reader = CostReader(cost)

    def seconds(decodes: int, kv_tokens: int, prompts: Sequence[tuple[int, int]]) -> float:
        return sum(reader.step(decodes, kv_tokens, list(prompts)).stages_s)

    return seconds
