"""Seconds of one step of a deployment, computed from its cost tables in plain Python."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lengthwise.schema.cost_tables import MERGED, CostTables, Floats, grid_value
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.speculation import Drafter, Speculation

StepTime = Callable[[int, int, Sequence[tuple[int, int]]], float]
"""Seconds of a step of (decodes, KV tokens that they read, prompts as (chunk, context before it))."""


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step by part, summed over all layers and stages, and ``stages_s`` of each pipeline stage."""

    layer_s: float
    comm_s: float
    prefill_attention_s: float
    decode_attention_s: float
    host_s: float
    head_s: float
    embedding_s: float
    send_s: float
    stages_s: list[float]


NO_COST = StepCost(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, [])
"""Of a data-parallel rank without sequences, which waits for the end of the other ranks' step."""


@dataclass(frozen=True)
class Drafts:
    """The proposed tokens that the decodes of a step verify (speculative decoding).

    ``pairs`` is the number of (query, key) pairs of the ``tokens`` proposed tokens, each of which takes at least
    ``pair_s`` of one layer's attention. The drafter takes ``drafter_s`` after the step.
    """

    tokens: int
    pairs: int
    pair_s: float
    drafter_s: float


@dataclass(frozen=True)
class _LayerCost:
    """Seconds of the parts of a step: ``layer`` to ``decode`` of one layer, ``host`` to ``send`` of the step."""

    layer: float
    comm: float
    prefill: float
    decode: float
    host: float
    head: float
    embedding: float  # of tokens
    send: float


class CostReader:
    """Reads the cost of one step at a time from cost tables.

    With ``by_stage`` it sums the stages one after the other even if all are alike, as the kernel does for the decode
    side, so that both round alike. With ``hide_host``, ``stages_s`` leave out the host's seconds.
    """

    def __init__(self, cost: CostTables, *, by_stage: bool = False, hide_host: bool = False) -> None:
        self._cost = cost
        self._by_stage, self._hide_host = by_stage, hide_host
        self._axis = [grid_value(i) for i in range(max(*cost.prefill_s.shape, *cost.decode_s.shape))]
        self._other = None if cost.other is None else CostReader(cost.other.tables)

    def step(
        self,
        decodes: int,
        kv_tokens: int,
        prompts: list[tuple[int, int]],
        swap_s: float = 0.0,
        drafts: Drafts | None = None,
    ) -> StepCost:
        """Return a step's cost. Decodes read ``kv_tokens`` in total. Prompts are (chunk, context before the chunk).

        ``drafts`` are the proposed tokens that the decodes verify, with one pipeline stage only.
        """
        one = other = self._layer_cost(decodes, kv_tokens, prompts, drafts)
        if self._other is not None:
            other = self._other._layer_cost(decodes, kv_tokens, prompts)  # noqa: SLF001
        cost, layers = self._cost, [float(n) for n in self._cost.stage_layers]
        last, stage_other = len(layers) - 1, [0] * len(layers)
        if cost.other is not None:
            stage_other = cost.other.stages.tolist()
        by_stage = [other if is_other else one for is_other in stage_other]
        stages = []
        for p, (n, read) in enumerate(zip(layers, by_stage, strict=True)):
            stage_s = n * (read.layer + read.comm + read.prefill + read.decode)
            if p == 0:
                stage_s += read.embedding + (0.0 if self._hide_host else read.host) + swap_s
            head_s = read.head + (drafts.drafter_s if drafts else 0.0)
            stages.append(stage_s + (head_s if p == last else read.send))
        if self._other is None and not self._by_stage:
            n = float(cost.stage_layers.sum())
            sums = n * one.layer, n * one.comm, n * one.prefill, n * one.decode
            return StepCost(*sums, one.host, one.head, one.embedding, last * one.send, stages)
        # Sums in the kernel's order: stage by stage.
        layer = comm = prefill = decode = send = 0.0
        for p, (n, read) in enumerate(zip(layers, by_stage, strict=True)):
            layer += n * read.layer
            comm += n * read.comm
            prefill += n * read.prefill
            decode += n * read.decode
            send += read.send if p < last else 0.0
        host, head, embedding = by_stage[0].host, by_stage[-1].head, by_stage[0].embedding
        return StepCost(layer, comm, prefill, decode, host, head, embedding, send, stages)

    def recompute_steps(self, tokens: int, swap_s: float | None, decodes: int, kv_tokens: int) -> float:
        """Return the cost of a preemption, in decode steps of the replica's batch.

        The seconds to recompute ``tokens`` tokens in one layer are divided by a decode step's seconds in one layer. If
        ``swap_s`` is given, the cache is swapped instead, and ``swap_s`` is divided by a decode step in all layers.
        """
        cost = self._cost
        seqs = max(1, decodes)
        step = _row(cost.layer_s, seqs) + _row(cost.comm_s, seqs) + self.shared_layer_s(seqs)
        step += self._decode(decodes, kv_tokens, 0) + self._masked_s(decodes, kv_tokens, kv_tokens)
        if swap_s is not None:
            return swap_s / (float(sum(cost.stage_layers)) * step)
        prompts = [(tokens, 0)] if tokens > 0 else []
        layer_s = _row(cost.layer_s, tokens) + _row(cost.comm_s, tokens) + self.shared_layer_s(tokens)
        return (layer_s + self._prefill(prompts)) / step

    def shared_s(self, tokens: int) -> list[float]:
        """Return for each stage the seconds in which all data-parallel ranks compute ``tokens`` tokens together."""
        return [float(layers) * self.shared_layer_s(tokens) for layers in self._cost.stage_layers]

    def shared_layer_s(self, tokens: int) -> float:
        """Return ``shared_s`` of one layer, or 0 if ranks compute nothing together."""
        return 0.0 if self._cost.shared_s is None else _row(self._cost.shared_s, tokens)

    def prefill_s(self, tokens: int, context: int) -> float:
        """Return the seconds in which all layers compute ``tokens`` prompt tokens after ``context`` others."""
        cost = self._cost
        layer_s = _row(cost.layer_s, tokens) + _row(cost.comm_s, tokens) + self._prefill([(tokens, context)])
        return float(sum(cost.stage_layers)) * layer_s

    def prompt_attention_s(self, tokens: int) -> float:
        """Return the seconds of one layer's attention for a prompt of ``tokens`` tokens."""
        return self._prefill([(tokens, 0)])

    def drafter_s(
        self,
        chosen: Speculation,
        passes: int,
        verified: int,
        decodes: int,
        kv_tokens: int,
        prompts: list[tuple[int, int]],
    ) -> float:
        """Return the seconds in which a drafter with these tables proposes ``passes`` tokens after a step.

        Its first pass has all tokens of the step, with the ``verified`` proposed ones. The others have one token of
        each sequence.
        """
        if passes == 0:
            return 0.0
        drafter, seconds, seqs = chosen.drafter, chosen.pass_s, decodes + len(prompts)
        if drafter.layers > 0.0:
            tokens = decodes + verified + sum(chunk for chunk, _ in prompts)
            keys = kv_tokens + sum(context + chunk for chunk, context in prompts)
            first_s = self._prefill(prompts) + self._decode(decodes, kv_tokens, len(prompts))
            seconds += self._pass_s(drafter, tokens, seqs, first_s)
            seconds += (passes - 1) * (chosen.pass_s + self._pass_s(drafter, seqs, seqs, self._decode(seqs, keys, 0)))
        return seconds

    def _pass_s(self, drafter: Drafter, tokens: int, seqs: int, attention_s: float) -> float:
        layer_s = _row(self._cost.layer_s, tokens) + _row(self._cost.comm_s, tokens)
        return drafter.layers * (layer_s + attention_s) + drafter.head_share * _row(self._cost.head_s, seqs)

    def _layer_cost(
        self, decodes: int, kv_tokens: int, prompts: list[tuple[int, int]], drafts: Drafts | None = None
    ) -> _LayerCost:
        cost, verified = self._cost, drafts.tokens if drafts else 0
        tokens = decodes + sum(chunk for chunk, _ in prompts)
        seqs = decodes + len(prompts)
        keys = kv_tokens + sum(context + chunk for chunk, context in prompts)
        own = sum(chunk * (context + chunk) for chunk, context in prompts)
        decode_s = self._decode(decodes, kv_tokens, len(prompts)) + self._masked_s(decodes, keys, kv_tokens)
        if drafts and verified:
            decode_s = max(decode_s, drafts.pair_s * (kv_tokens + drafts.pairs))
        return _LayerCost(
            layer=_row(cost.layer_s, tokens + verified),
            comm=_row(cost.comm_s, tokens + verified),
            prefill=self._prefill(prompts) + self._masked_s(tokens - decodes, keys, own),
            decode=decode_s,
            host=_row(cost.host_s, seqs),
            head=_row(cost.head_s, seqs + verified),
            embedding=_row(cost.embedding_s, tokens + verified),
            send=_row(cost.send_s, tokens + verified),
        )

    def _masked_s(self, queries: int, keys: int, own: int) -> float:
        return self._cost.masked_s * (queries * keys - own) if queries else 0.0

    def _prefill(self, prompts: list[tuple[int, int]]) -> float:
        rule = self._cost.rule
        if not prompts:
            return 0.0
        if rule.kind != MERGED:
            total = 0.0
            for chunk, context in prompts:  # Not ``sum``, which compensates: the kernel adds one by one.
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


def step_time(cost: CostTables) -> StepTime:
    """Return a function for the seconds of a step through all pipeline stages of a replica."""
    reader = CostReader(cost.alone())

    def seconds(decodes: int, kv_tokens: int, prompts: Sequence[tuple[int, int]]) -> float:
        return sum(reader.step(decodes, kv_tokens, list(prompts)).stages_s)

    return seconds


def service_rate(deployment: Deployment, prompt_tokens: float, output_tokens: float) -> float:
    """Return the requests of mean length that a replica with full slots completes per second.

    A request takes the seconds of its prompt alone, and its share of a decode step for each output token. As many
    sequences decode as ``max_num_seqs`` and the KV cache allow, in equal steps of each pipeline stage. Steps that mix
    prompts and decodes are faster, so this is a scale to compare replicas, not a bound.
    """
    limits, kv, reader = deployment.limits, deployment.kv, CostReader(deployment.cost)
    micro_batches = len(deployment.cost.stage_layers)
    context = prompt_tokens + output_tokens / 2
    residents = min(limits.max_num_seqs, kv.num_blocks * kv.block_size / (prompt_tokens + output_tokens))
    seqs = max(1, round(min(residents / micro_batches, limits.max_step_seqs or residents)))
    decode_s = max(reader.step(seqs, round(seqs * context), []).stages_s) / seqs
    prompt_s = max(reader.step(0, 0, [(max(1, round(prompt_tokens)), 0)]).stages_s)
    return 1.0 / (prompt_s + output_tokens * decode_s)
