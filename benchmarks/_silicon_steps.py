"""One rank's operators of a measured deployment: attention by tensor or data parallelism, experts over GPUs.

``lengthwise.cost`` cuts by tensor parallelism. Here a rank of attention data parallelism has its own requests and
whole attention weights, the experts of all ranks stand on ``ep`` groups of ``moe_tp`` GPUs, and checkpoints that
keep attention at 16 bits (NVIDIA's NVFP4 of DeepSeek and Kimi, Moonshot's int4) are costed so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from _silicon_rows import Point

from lengthwise import catalog
from lengthwise.cost.memory import shard_of
from lengthwise.cost.operator_work import CURVES, Curves, Kernels, Operators, Work, kernels_of
from lengthwise.schema.cost_tables import CostTables, grid_axis
from lengthwise.schema.deployment import EngineLimits, Parallelism


@dataclass(frozen=True)
class Host:
    """What an engine's host adds: seconds a step, a sequence in it, a request before its first token.

    ``launch_s`` is a layer's of a step with a prompt where CUDA graphs hold decodes alone, ``queue_s`` what a
    request holds up those behind it on its way into the engine.
    """

    step_s: float = 126e-6
    sequence_s: float = 4.4e-6
    request_s: float = 0.0
    queue_s: float = 0.0
    launch_s: float = 0.0


class RankOperators(Operators):
    """The operators of one rank of a measured deployment; ``tokens`` are the rank's own.

    Args:
        point: What was measured.
        curves: Constants of the kernels.
    """

    def __init__(self, point: Point, curves: Curves = CURVES) -> None:
        model, gpu = catalog.model(point.model), catalog.gpu(point.gpu)
        limits = EngineLimits(weight_dtype=point.dtype, kv_dtype=kv_dtype(point))
        node = catalog.default_node(gpu, point.tp * point.dp)
        self.experts = replace(kernels_of(gpu, point.dtype), curves=curves)
        super().__init__(shard_of(model, Parallelism(point.tp), limits), self._dense(point, curves), node)
        self.point, self.gpus = point, point.tp * point.dp

    def _dense(self, point: Point, curves: Curves) -> Kernels:
        wide_attention = point.dtype in ("fp4", "int4") and point.model in ("deepseek-v3", "kimi-k2")
        dtype = "bfloat16" if wide_attention else point.dtype
        return replace(kernels_of(catalog.gpu(point.gpu), dtype), curves=curves)

    def all_reduces(self, tokens: Any) -> list[Work]:
        """After attention and after the MLP; with data parallelism one gather and scatter of all ranks' tokens."""
        if self.gpus == 1:
            return []
        times = 2 if self.tp > 1 else 1
        return [self._all_reduce("all-reduce", self.model.hidden * tokens * self.point.dp).times(times)]

    def _all_reduce(self, name: str, elements: Any) -> Work:
        return self._network(name, 2 * (self.gpus - 1) / self.gpus * elements * self.wide)

    def _network(self, name: str, sent_bytes: Any) -> Work:
        kept, self.tp = self.tp, self.gpus
        work = super()._network(name, sent_bytes)
        self.tp = kept
        return work

    def _moe(self, tokens: Any) -> list[Work]:
        """A GPU's share: the experts of its group that any rank's tokens hit, each ``1 / moe_tp`` wide."""
        ffn, hidden, point = self.model.ffn, self.model.hidden, self.point
        everyone = np.asarray(tokens) * point.dp
        hit = self.experts_hit(everyone) / point.ep
        rows = everyone * ffn.experts_per_token / point.ep
        width = ffn.expert_intermediate / point.moe_tp
        works = [
            self.kernels.gemm("router", tokens, ffn.experts, hidden, wide=True),
            self.experts.grouped_gemm("experts up", rows, hit, 2 * width, hidden),
            self.kernels.stream("expert activation", 3 * width * self.wide * rows),
            self.experts.grouped_gemm("experts down", rows, hit, hidden, width),
        ]
        if ffn.shared_intermediate:
            works += [self._rename(work, "shared ") for work in self._mlp(tokens, ffn.shared_intermediate)]
        return works


def kv_dtype(point: Point) -> str | None:
    """InferenceMAX asks for FP8 for Llama and DeepSeek; elsewhere engines keep 16 bits."""
    return "fp8" if point.inferencemax and point.model != "kimi-k2" else "bfloat16"


def step_s(ops: RankOperators, host: Host, *, seqs: Any, kv: Any, chunk: Any = 0, prompts: Any = 0) -> Any:
    """Seconds of a step of ``seqs`` decodes over ``kv`` cached tokens and ``prompts`` chunks of ``chunk`` tokens."""
    layers, tokens = ops.model.layers, seqs + chunk * prompts
    works = ops.layer(tokens) + ops.all_reduces(tokens)
    total = sum(work.seconds for work in works)
    total = total + sum(work.seconds for work in ops.decode(seqs, kv)) * (np.asarray(seqs) > 0)
    prompt = sum(work.seconds for work in ops.prefill(chunk, 0)) + host.launch_s
    total = total + prompts * prompt * (np.asarray(prompts) > 0)
    ends = sum(work.seconds for work in ops.first(tokens) + ops.head(seqs + prompts))
    return layers * total + ends + host.step_s + host.sequence_s * (seqs + prompts)


def tables(ops: RankOperators, host: Host, seqs: int, budget: int, length: int) -> CostTables:
    """The cost tables of one rank, as ``lengthwise.cost.roofline_tables`` lays them out."""
    tokens, batch = np.arange(max(budget, seqs) + 1.0), np.arange(seqs + 1.0)
    chunk, context = grid_axis(max(budget, length)), grid_axis(length)
    some, cached = grid_axis(seqs), grid_axis(min(seqs * length, 2**24))

    def table(works: Any, *axes: Any) -> Any:
        shape = np.broadcast_shapes(*(axis.shape for axis in axes))
        seconds = np.zeros(shape) + sum((work.seconds for work in works(*(axis.astype(float) for axis in axes))), 0.0)
        seconds[0] = 0.0
        return seconds

    prompts = table(ops.prefill, chunk[:, None], context[None, :])
    prompts[1:] += host.launch_s
    return CostTables(
        layer_s=table(ops.layer, tokens),
        comm_s=table(ops.all_reduces, tokens),
        first_s=table(ops.first, tokens),
        send_s=np.zeros(len(tokens)),
        head_s=table(ops.head, batch),
        host_s=host.step_s + host.sequence_s * batch,
        prefill_s=prompts,
        decode_s=table(ops.decode, some[:, None], cached[None, :]),
        stage_layers=np.array([ops.model.layers]),
    )
