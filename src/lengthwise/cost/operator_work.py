"""Roofline work of each operator of a step: its FLOPs, bytes and messages on one GPU of one pipeline stage.

The methods of ``Operators`` take numbers or arrays and return Work of the same shape. In an encoder-decoder model, the
operators of ``layer`` also stand for a prompt's tokens in an encoder layer, which need as many FLOPs per token; if the
encoder has more layers than the decoder, the surplus is added to the prefill. The KV tokens of a decode are those of
cross-attention plus those of self-attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lengthwise import catalog
from lengthwise.cost.experts import busiest_gpu
from lengthwise.cost.memory import Shard
from lengthwise.schema.cost_tables import Floats
from lengthwise.schema.specs import DTYPE_BYTES, GpuSpec, LinearAttentionSpec, LinkSpec, ModelSpec, NodeSpec, dtype_name

OVERLAP_POWER = 4  # compute and memory time overlap as (compute^4 + memory^4)^(1/4): a smooth maximum
SCALE_BYTES = {"fp4": 1 / 16, "int4": 2.5 / 128}
"""Bytes of scales per weight: NVFP4 has an 8-bit scale for 16 weights, AWQ a 16-bit scale and 4-bit zero for 128."""


@dataclass(frozen=True)
class GemmCurve:
    """Constants of GEMMs: the share of peak FLOP/s of a large GEMM, padding of m, n and k, and seconds of a launch."""

    efficiency: float
    pad_m: float
    pad_n: float
    pad_k: float
    latency_s: float
    memory_efficiency: float = 0.8


@dataclass(frozen=True)
class StreamCurve:
    """Constants of element-wise kernels. On A100, H100 and A40, Vidur measures 0.4-0.9 of the bandwidth, 1.2-2.8 us."""

    memory_efficiency: float = 0.6
    latency_s: float = 2.4e-6


@dataclass(frozen=True)
class PrefillCurve:
    """Constants of FlashAttention, which computes tiles of queries."""

    efficiency: float = 0.54  # share of peak FLOP/s for long prompts
    pad_tokens: float = 190  # queries of padding
    latency_s: float = 12e-6
    serial_s: float = 2e-8  # per key: a thread block reads the keys of its queries one by one
    memory_efficiency: float = 0.8


@dataclass(frozen=True)
class DecodeCurve:
    """Constants of decode attention. If g query heads share a KV head, they use g / (g + ``tile_rows``) of a tile."""

    efficiency: float = 0.7  # FlashMLA for groups of 128: 660 of 989 TFLOP/s (github.com/deepseek-ai/FlashMLA)
    tile_rows: float = 64
    latency_s: float = 11.7e-6
    sequence_s: float = 3e-8
    memory_efficiency: float = 0.8


@dataclass(frozen=True)
class Curves:
    """Constants of all kinds of kernels, by default the constants of the roofline."""

    wide: GemmCurve = GemmCurve(0.82, 80, 80, 96, 4e-6)
    narrow: GemmCurve = GemmCurve(0.72, 120, 2400, 400, 6e-6)
    grouped: GemmCurve = GemmCurve(0.6, 40, 80, 96, 10e-6, 0.7)
    stream: StreamCurve = StreamCurve()
    prefill: PrefillCurve = PrefillCurve()
    decode: DecodeCurve = DecodeCurve()
    # Routing is uneven: T tokens hit as many experts as T**0.96 uniformly routed ones (benchmarks/_silicon.py).
    routing_power: float = 0.96

    def launched_meanwhile(self) -> Curves:
        """Return the constants of products and element-wise kernels whose launches other kernels hide."""
        kinds = {kind: replace(getattr(self, kind), latency_s=0.0) for kind in ("wide", "narrow", "stream")}
        return replace(self, **kinds)


CURVES = Curves()
CPU_CURVES = Curves(
    wide=replace(CURVES.wide, pad_m=0, pad_n=0, pad_k=0),
    narrow=replace(CURVES.narrow, pad_m=0, pad_n=0, pad_k=0),
    grouped=replace(CURVES.grouped, pad_m=0, pad_n=0, pad_k=0),
    prefill=replace(CURVES.prefill, pad_tokens=0, serial_s=0.0),
    decode=replace(CURVES.decode, tile_rows=0),
)
"""Constants for CPUs: those of GPUs without the padding of tiles, which a CPU's kernels do not need. Measured steps of
vLLM 0.32 with a 28M model on one core of an AMD EPYC (chunks of 8 to 240 tokens after 0 to 768 cached ones, the fastest
of 9 runs) take 0.48 to 1.26 times (median 1.0) the roofline's time; padding makes it 3.2 times too slow."""


@dataclass(frozen=True)
class Work:
    """The work of one operator. Except for ``name``, the fields are numbers or arrays of one shape."""

    name: str
    flops: Any = 0.0
    bytes: Any = 0.0
    compute_s: Any = 0.0
    memory_s: Any = 0.0
    network_s: Any = 0.0
    latency_s: Any = 0.0

    @property
    def seconds(self) -> Floats:
        """Return the seconds of the operator: compute and memory overlap, network and launch are added."""
        power = OVERLAP_POWER
        overlapped = (np.asarray(self.compute_s) ** power + np.asarray(self.memory_s) ** power) ** (1 / power)
        return np.asarray(overlapped + self.network_s + self.latency_s, dtype=np.float64)

    def times(self, factor: Any) -> Work:
        """Return the work multiplied by ``factor``. A factor below 1 stands for a share of the layers."""
        return replace(self, **{name: factor * getattr(self, name) for name in QUANTITIES})


QUANTITIES = ("flops", "bytes", "compute_s", "memory_s", "network_s", "latency_s")


def total_work(name: str, works: Sequence[Work]) -> Work:
    """Return the sum of several works, under the name ``name``."""
    return Work(name, **{quantity: sum(getattr(work, quantity) for work in works) for quantity in QUANTITIES})


PROFILE_OPERATORS: dict[str, tuple[tuple[str, float], ...]] = {
    "input norm": (("norms", 0.5),),
    "post-attention norm": (("norms", 0.5),),
    "residual add": (("norms", 0.375),),
    "fused moe": (("experts up", 1.0), ("expert activation", 1.0), ("experts down", 1.0)),
    "moe block": (("router", 1.0), ("experts up", 1.0), ("expert activation", 1.0), ("experts down", 1.0)),
}
"""Operators of a profile as shares of roofline operators: two norms move 8 hidden sizes a token, a residual 3."""


def profile_work(works: list[Work], operator: str) -> Work | None:
    """Return the roofline's work for an operator of a profile, or None if ``works`` lacks a part of the operator.

    A profile may divide or unite operators of the roofline (PROFILE_OPERATORS).
    """
    shares = PROFILE_OPERATORS.get(operator, ((operator, 1.0),))
    by_name = {work.name: work for work in works}
    if any(name not in by_name for name, _ in shares):
        return None
    return total_work(operator, [by_name[name].times(share) for name, share in shares])


def layer_share(model: ModelSpec, operator: str) -> float:
    """Return the share of a model's layers that have an operator (tables describe the mean of all layers)."""
    ffn, attention = model.ffn, model.attention
    if ffn.experts and operator in ("mlp up", "activation", "mlp down"):
        return ffn.dense_layers / model.layers
    if ffn.experts and operator.startswith(("router", "expert", "fused moe", "moe block", "shared ")):
        return 1 - ffn.dense_layers / model.layers
    windowed = attention.windowed_layers / model.layers if attention.window_tokens else 0.0
    if operator.endswith("window attention"):
        return windowed
    caching = model.caching_layers / model.layers
    if operator in ("prefill attention", "decode attention"):
        return caching - windowed
    return caching if operator in ("qkv projection", "rope", "kv write", "output projection") else 1.0


def launched_kernels(model: ModelSpec, weight_dtype: str | None, tp: int) -> float:
    """Return how many kernels engines launch for a layer of a step without a CUDA graph, on average over the layers.

    A product with weights of 8 or 4 bits first quantizes its input, but for AWQ and GPTQ. ``weight_dtype`` None is the
    dtype as published.
    """
    attention, ffn = model.attention, model.ffn
    dense, routed = (
        int(DTYPE_BYTES[name] < DTYPE_BYTES["bfloat16"] and name != "int4")
        for name in (catalog.dense_dtype(model, weight_dtype), dtype_name(weight_dtype or model.dtype))
    )
    # Projections, rotary embedding, cache write and attention; with MLA two norms and an up-projection, too.
    attend = 8.0 + 3 * dense + routed if attention.is_mla else 5.0 + 2 * dense
    attend += 9 if attention.index_heads else 0  # projections, norm, quantization, scores and the choice
    if attention.linear:
        caching = model.caching_layers / model.layers
        # Two norms and a gate in the other layers; three for gates and eight for the chunked delta rule in these.
        attend = caching * (attend + 2) + (1 - caching) * (15 + 2 * dense)
    mlp = 3.0 + 2 * max(dense, routed)
    if ffn.experts:
        # Router, choice of experts, sort (2), two products, activation and the weighted sum.
        moe = 9.0 + 2 * routed + (mlp + 1 if ffn.shared_intermediate else 0)
        share = ffn.dense_layers / model.layers
        mlp = share * mlp + (1 - share) * moe
    return 2 + attend + mlp + (2 if tp > 1 else 0)  # norms and all-reduces


@dataclass(frozen=True)
class Kernels:
    """The kernels of a GPU, whose methods return the roofline work of one operation.

    ``weight_dtype`` is the dtype of the weights. An element of the activations has ``wide_bytes`` bytes. With
    ``has_blocks`` FP8 weights have a scale for each block, for which a kernel quantizes the input of a product.
    """

    gpu: GpuSpec
    weight_dtype: str
    wide_bytes: float = 2.0
    curves: Curves = CURVES
    has_blocks: bool = False

    def gemm(self, name: str, m: Any, n: Any, k: Any, *, wide: bool = False) -> Work:
        """Return the work of an [m, k] by [k, n] product. With ``wide`` the weights have 16 bits (embedding, head)."""
        curve = self.curves.narrow if self._peak(wide) > self._peak(wide=True) else self.curves.wide
        return self._gemm(name, (m, 1.0), n, k, curve, wide=wide)

    def grouped_gemm(self, name: str, m: Any, groups: Any, n: Any, k: Any) -> Work:
        """Return the work of ``groups`` products with m rows in total, each with its own [k, n] weights (fused MoE)."""
        return self._gemm(name, (m, groups), n, k, self.curves.grouped, wide=False)

    def _gemm(self, name: str, rows: tuple[Any, Any], n: Any, k: Any, curve: GemmCurve, *, wide: bool) -> Work:
        m, groups = rows
        scaled_bytes = DTYPE_BYTES[self.weight_dtype] + SCALE_BYTES.get(self.weight_dtype, 0.0)
        moved = groups * n * k * (self.wide_bytes if wide else scaled_bytes) + self.wide_bytes * m * (n + k)
        padded = 2.0 * (m + curve.pad_m * groups) * (n + curve.pad_n) * (k + curve.pad_k)
        is_fp8 = self.weight_dtype == "fp8" and self._peak(wide) > self._peak(wide=True)
        return Work(
            name,
            flops=2.0 * m * n * k,
            bytes=moved,
            compute_s=padded / (self._peak(wide) * curve.efficiency),
            memory_s=moved / (self.gpu.bandwidth_bytes_per_s * curve.memory_efficiency),
            latency_s=curve.latency_s + self.curves.stream.latency_s * (self.has_blocks and is_fp8),
        )

    def stream(self, name: str, moved_bytes: Any, *, kernels: int = 1, latency_s: Any = None) -> Work:
        """Return the work of ``kernels`` element-wise kernels that move ``moved_bytes`` in total."""
        curve = self.curves.stream
        bandwidth = self.gpu.bandwidth_bytes_per_s * curve.memory_efficiency
        each_s = curve.latency_s if latency_s is None else latency_s
        return Work(name, bytes=moved_bytes, memory_s=moved_bytes / bandwidth, latency_s=kernels * each_s)

    def prefill(self, name: str, *, pairs: Any, mean_keys: Any, keys: Any, head_flops: Any, moved_bytes: Any) -> Work:
        """Return the work of FlashAttention over ``pairs`` (query, key) pairs, which take ``head_flops`` FLOPs each.

        ``mean_keys`` is the number of keys that a query sees on average, ``keys`` the number of all keys that are read.
        """
        curve = self.curves.prefill
        # Each query of padding adds the keys that a query sees on average.
        padded = pairs + curve.pad_tokens * (mean_keys + curve.pad_tokens / 2)
        memory_s = moved_bytes / (self.gpu.bandwidth_bytes_per_s * curve.memory_efficiency)
        return Work(
            name,
            flops=head_flops * pairs,
            bytes=moved_bytes,
            compute_s=head_flops * padded / (self._peak(wide=True) * curve.efficiency),
            memory_s=(memory_s**OVERLAP_POWER + (curve.serial_s * keys) ** OVERLAP_POWER) ** (1 / OVERLAP_POWER),
            latency_s=curve.latency_s,
        )

    def decode(self, name: str, *, seqs: Any, keys: Any, head_flops: Any, moved_bytes: Any, group: Any) -> Work:
        """Return the work of decode attention over ``keys`` cached tokens in total, each read by ``group`` heads."""
        curve = self.curves.decode
        tile = group / (group + curve.tile_rows)
        return Work(
            name,
            flops=head_flops * keys,
            bytes=moved_bytes,
            compute_s=head_flops * keys / (self._peak(wide=True) * curve.efficiency * tile),
            memory_s=moved_bytes / (self.gpu.bandwidth_bytes_per_s * curve.memory_efficiency),
            latency_s=curve.latency_s + curve.sequence_s * seqs,
        )

    def _peak(self, wide: bool) -> float:
        # Weights in a format without hardware support are multiplied in 16 bits, as are int4 weights on any GPU.
        if wide or self.weight_dtype == "int4":
            return self.gpu.flops("float32" if self.wide_bytes > DTYPE_BYTES["bfloat16"] else "bfloat16")
        return self.gpu.flops(self.weight_dtype)


def kernels_of(gpu: GpuSpec, weight_dtype: str) -> Kernels:
    """Return the kernels of a GPU for a dtype of weights in any spelling."""
    name = dtype_name(weight_dtype)
    return Kernels(gpu, name, max(2.0, DTYPE_BYTES[name]), CPU_CURVES if gpu.is_cpu else CURVES)


SPARSE_HEADS = 64  # query heads of a tile of FlashMLA's sparse prefill (github.com/deepseek-ai/FlashMLA)
SAMPLER_PASSES = 4
"""Passes over fp32 logits. With 12 us of launches they take 0.8 to 1.5 times the time of vLLM 0.19's sampler on an
RTX PRO 6000 and an RTX 4090 (25 us for 1 sequence, 160 to 310 us for 256; LLMServingSim, MIT)."""

SAMPLER_LATENCY_S = 12e-6
DIRECT_HOP_S = 0.7e-6
"""Added latency per doubling of the GPUs in vLLM's custom all-reduce (CUDA graph, smallest messages): 4.9, 5.2 and
5.7 us over 2, 4 and 8 A100s, 4.3, 4.6 and 4.7 us over H100s (AIConfigurator, Apache-2.0). NCCL: 10, 14 and 23 us."""

GATHER_EFFICIENCY = 0.7
GATHER_HOPS, GATHER_HOP = 1.8, 0.24
"""An all-gather or reduce-scatter of NCCL over n GPUs that one link joins reaches this share of the link's bandwidth in
an all-reduce, and its smallest message takes 1.8 + 0.24 (n - 1) times the link's latency. Fitted to 504 times of up to
512 MiB over 2, 4 and 8 A100, H100, H200 and B200 (AIConfigurator, Apache-2.0); median error 13 %, 95th percentile
40 %."""

DEEPEP_LATENCY_S = 40e-6
"""Seconds of the smallest dispatch or combine of DeepEP. With it, the published times of its low-latency kernels (8 to
256 H800, github.com/deepseek-ai/DeepEP, docs/legacy.md) follow from the bytes: median error 2 %, largest 12 %."""

DISPATCH_BYTES = {"fp8": 1 + 4 / 128, "int8": 1.0, "fp4": 0.5 + 1 / 16}
"""Bytes of an element of a dispatched token by dtype of the weights: vLLM quantizes before it sends, with a 32-bit
scale for 128 elements (FP8) or an 8-bit one for 16 (NVFP4). Other tokens, and all results, have 16 bits."""

P2P_LATENCY_S = 8e-6  # Vidur measures 8 to 14 us for the smallest send_recv between NVLink pairs and inside a DGX


class Operators:
    """The work of a deployment's operators, for one layer or one step, on one GPU."""

    def __init__(self, shard: Shard, kernels: Kernels, node: NodeSpec) -> None:
        # FP8 checkpoints of models with experts have a scale for each block of 128 by 128 weights, as DeepSeek-V3's.
        kernels = replace(kernels, has_blocks=shard.model.ffn.experts > 0)
        self.shard, self.node, self.expert_kernels = shard, node, kernels
        self.kernels = replace(kernels, weight_dtype=catalog.dense_dtype(shard.model, kernels.weight_dtype))
        self.output_kernels = kernels if shard.model.metadata.fp4_outputs else self.kernels
        # Engines launch shared experts on a second stream, during the routed ones.
        self.second_stream = replace(self.output_kernels, curves=kernels.curves.launched_meanwhile())
        self.model, self.tp, self.is_mla = shard.model, shard.parallel.tp, shard.model.attention.is_mla
        self.dp = shard.parallel.dp
        self.wide = kernels.wide_bytes
        self.launched = launched_kernels(shard.model, shard.weight_dtype, self.tp)

    def layer(self, tokens: Any) -> list[Work]:
        """Return one layer's operators whose work depends on tokens: GEMMs, norms, rotary embedding, cache write."""
        hidden = self.model.hidden
        norms = 3 if self.model.encoder_layers else 2
        works = [
            *(self._latent_projections(tokens) if self.is_mla else self._projections(tokens)),
            self.kernels.stream("kv write", tokens * self.shard.kv_bytes * 2),
        ]
        if linear := self.model.attention.linear:
            caching = self.model.caching_layers / self.model.layers
            works = [work.times(caching) for work in works]
            works += [work.times(1 - caching) for work in self._linear_projections(tokens, linear)]
        works.insert(0, self.kernels.stream("norms", norms * 4 * hidden * self.wide * tokens, kernels=norms))
        ffn = self.model.ffn
        dense = ffn.dense_layers / self.model.layers if ffn.experts else 1.0
        works += (
            [work.times(dense) for work in self._mlp(tokens, ffn.intermediate, self.output_kernels)] if dense else []
        )
        works += [work.times(1 - dense) for work in self._moe(tokens)] if ffn.experts else []
        return works

    def shared(self, tokens: Any) -> list[Work]:
        """Return one layer's work that all data-parallel ranks do together, on ``tokens`` tokens of all ranks.

        It is that of the routed experts on the busiest GPU, and of the exchange of tokens before and after them.
        """
        ffn = self.model.ffn
        if self.dp == 1:
            return []
        _, *routed = self._routed(tokens)
        return [work.times(1 - ffn.dense_layers / self.model.layers) for work in (*routed, *self.exchange(tokens))]

    def exchange(self, tokens: Any) -> list[Work]:
        """Return the dispatch of ``tokens`` tokens of all ranks to the GPUs of their experts, and the way back.

        Each takes max(bytes inside a node / its link, bytes between nodes / the network) and a latency. An all-gather
        brings every token to every GPU. DeepEP's low-latency kernels send a token once for each of its experts, the
        others once to each GPU and, over the network, once to each node with one of its experts. The busiest GPU
        receives, and sends back, more than the mean.
        """
        parallel, ffn, hidden = self.shard.parallel, self.model.ffn, self.model.hidden
        gpus, local = self.tp * self.dp, min(self.tp * self.dp, self.node.gpus)
        nodes, k = -(-gpus // self.node.gpus), ffn.experts_per_token
        own, link = tokens / gpus, self.node.link_for(local)  # each GPU has an equal share of the tokens
        if parallel.all2all_backend == "allgather_reducescatter":
            parts = gpus if parallel.ep > 1 else self.dp  # with experts on single GPUs, tp divides the tokens, too
            inside, between = (parts - 1) / parts * tokens, (1 - 1 / nodes) * tokens / local
            latency_s = (GATHER_HOPS + GATHER_HOP * (local - 1)) * link.latency_s
            latency_s += self.node.network.latency_s if nodes > 1 else 0.0
            inside, names = inside / GATHER_EFFICIENCY, ("all-gather", "reduce-scatter")
        else:
            rows, _ = self.busiest(tokens)
            uneven = np.maximum(rows, 1e-300) / np.maximum(tokens * k / gpus, 1e-300)
            if parallel.all2all_backend == "deepep_low_latency":
                inside, between = own * k * (local - 1) / gpus, own * k * (gpus - local) / gpus
            else:
                inside = own * (gpus - 1) * (1 - (1 - 1 / gpus) ** k)
                between = own * (nodes - 1) * (1 - (1 - 1 / nodes) ** k)
            inside, between, latency_s = inside * uneven, between * uneven, DEEPEP_LATENCY_S
            names = ("dispatch", "combine")
        sent = (
            DISPATCH_BYTES.get(self.expert_kernels.weight_dtype, self.wide) * hidden + 8 * k
        )  # with weights and experts
        return [
            Work(
                name,
                bytes=each * (inside + between),
                network_s=np.maximum(
                    each * inside / link.bandwidth_bytes_per_s, each * between / self.node.network.bandwidth_bytes_per_s
                ),
                latency_s=latency_s,
            )
            for name, each in zip(names, (sent, self.wide * hidden), strict=True)
        ]

    def all_reduces(self, tokens: Any) -> list[Work]:
        """Return one layer's all-reduces: after attention, after the MLP and after cross-attention."""
        if self.tp == 1:
            return []
        times = 3 if self.model.encoder_layers else 2
        return [self._all_reduce("all-reduce", self.model.hidden * tokens).times(times)]

    def embedding(self, tokens: Any) -> list[Work]:
        """Return the work of the token embedding."""
        works = [self.kernels.stream("embedding", 2 * self.model.hidden * self.wide * tokens)]
        if self.tp > 1:
            works.append(self._all_reduce("embedding all-reduce", self.model.hidden * tokens))
        return works

    def send(self, tokens: Any) -> list[Work]:
        """Return the transfer to the next stage: each GPU sends 1/tp of the hidden state and of the residual."""
        sent = 2 * self.model.hidden * self.wide * tokens / self.tp
        link = self.node.link_for(self.shard.parallel.gpus_per_replica)
        network_s = sent / link.bandwidth_bytes_per_s + link.latency_s
        return [Work("send", bytes=sent, network_s=network_s, latency_s=P2P_LATENCY_S)]

    def head(self, seqs: Any) -> list[Work]:
        """Return the work of final norm, LM head and sampler for ``seqs`` sequences, each with one token."""
        vocab, hidden = self.model.vocab, self.model.hidden
        works = [
            self.kernels.stream("final norm", 4 * hidden * self.wide * seqs),
            self.kernels.gemm("lm head", seqs, vocab / self.tp, hidden, wide=True),
            self.kernels.stream("sampler", SAMPLER_PASSES * 4 * vocab * seqs, latency_s=SAMPLER_LATENCY_S),
        ]
        if self.tp > 1:
            works.append(self._network("logits gather", self.wide * vocab * seqs * (self.tp - 1) / self.tp))
        return works

    def prefill(self, chunk: Any, context: Any) -> list[Work]:
        """Return one layer's attention work for ``chunk`` new tokens of a prompt after ``context`` cached tokens."""
        full, windowed = self._layer_shares
        works = [self._prefill("prefill attention", chunk, context, None).times(full)] if full else []
        if windowed:
            window = self.model.attention.window_tokens
            works.append(self._prefill("prefill window attention", chunk, context, window).times(windowed))
        if linear := self.model.attention.linear:
            works.append(self._linear_attention("prefill", chunk, 1.0, linear))
        if self.model.attention.index_heads:
            works = self._sparse_prefill(works[0], chunk, context)
        if self.is_mla:
            # A later chunk expands the latents of its context again; a first chunk has none.
            expansion = self._up_projection("context up-projection", self._chosen(context))
            works.append(expansion.times(np.asarray(context) > 0))
        extra_depth = self.model.encoder_layers / self.model.layers - 1
        if extra_depth > 0:
            works += [work.times(extra_depth) for work in self.layer(chunk)]
        return works

    def decode(self, seqs: Any, kv_tokens: Any) -> list[Work]:
        """Return one layer's attention work for one new token per sequence. ``kv_tokens`` are cached in total."""
        full, windowed = self._layer_shares
        works = [self._decode("decode attention", seqs, self._chosen(kv_tokens, seqs)).times(full)] if full else []
        if windowed:
            # The window cuts the mean context, since only the sum over sequences is known.
            seen = np.minimum(kv_tokens, seqs * (self.model.attention.window_tokens or 0))
            works.append(self._decode("decode window attention", seqs, seen).times(windowed))
        if linear := self.model.attention.linear:
            works.append(self._linear_attention("decode", seqs, seqs, linear))
        if self.model.attention.index_heads:
            works.append(self._indexer("decode", seqs, kv_tokens, kv_tokens))
        return works

    @property
    def _layer_shares(self) -> tuple[float, float]:
        attention = self.model.attention
        windowed = attention.windowed_layers / self.model.layers if attention.window_tokens else 0.0
        return self.model.caching_layers / self.model.layers - windowed, windowed

    def _chosen(self, keys: Any, seqs: Any = 1.0) -> Any:
        """Return how many of ``keys`` cached tokens attention reads: all, or those that an indexer chooses."""
        attention = self.model.attention
        return np.minimum(keys, seqs * attention.index_top_k) if attention.index_heads else keys

    def _sparse_prefill(self, dense: Work, chunk: Any, context: Any) -> list[Work]:
        """Return the indexer and attention: ``dense`` up to as many tokens as are chosen, then over the chosen ones.

        Sparse kernels multiply in the width of the latents, for SPARSE_HEADS heads at a time.
        """
        attention, heads = self.model.attention, self.shard.heads
        pairs, keys = causal_pairs(chunk, context, attention.index_top_k)
        head_flops = 2.0 * (2 * attention.kv_lora_rank + attention.rope_head_dim)
        padded, mean_keys = head_flops * max(heads, SPARSE_HEADS), pairs / np.maximum(chunk, 1)
        moved = keys * self.shard.kv_bytes + heads * head_flops / 2 * self.wide * chunk
        about = {"pairs": pairs, "mean_keys": mean_keys, "keys": keys, "head_flops": padded, "moved_bytes": moved}
        sparse = replace(self.kernels.prefill(dense.name, **about), flops=head_flops * heads * pairs)
        is_long = np.asarray(chunk) + context > attention.index_top_k
        attended = total_work(dense.name, [dense.times(~is_long), sparse.times(is_long)])
        pairs, keys = causal_pairs(chunk, context)
        return [attended, self._indexer("prefill", chunk, keys, pairs)]

    def _indexer(self, phase: str, queries: Any, keys: Any, pairs: Any) -> Work:
        """Return the work of sparse attention's indexer: every GPU scores all ``pairs`` with all its heads, in FP8.

        It reads the cached keys (FP8 with a 32-bit scale); the top k are chosen from 32-bit scores, written and read.
        """
        attention, gpu = self.model.attention, self.kernels.gpu
        width, curve = attention.index_head_dim, self.kernels.curves.prefill
        moved = (width + 4) * keys + attention.index_heads * width * queries + 8.0 * pairs
        flops = 2.0 * attention.index_heads * width * pairs
        work = self.kernels.stream(f"{phase} indexer", moved, kernels=2, latency_s=curve.latency_s)
        return replace(work, flops=flops, compute_s=flops / (gpu.flops("fp8") * curve.efficiency))

    def _linear_projections(self, tokens: Any, linear: LinearAttentionSpec) -> list[Work]:
        value = linear.value_heads * linear.value_head_dim
        into = linear.conv_channels + value + 2 * linear.value_heads
        channels = linear.conv_channels / self.tp
        return [
            self.kernels.gemm("linear projection in", tokens, into / self.tp, self.model.hidden),
            self.kernels.stream("convolution", 2 * channels * self.wide * tokens),
            # Engines compute the gates by a GEMM and a kernel of their own, and a norm of the gated output.
            self.kernels.stream("linear gates", 4 * value / self.tp * self.wide * tokens, kernels=3),
            self.kernels.gemm("linear projection out", tokens, self.model.hidden, value / self.tp),
        ]

    def _linear_attention(self, phase: str, tokens: Any, seqs: Any, linear: LinearAttentionSpec) -> Work:
        share = linear.layers / self.model.layers
        rows = linear.conv_channels + 2 * linear.value_heads * linear.value_head_dim
        moved = (2 * linear.state_elements * seqs + rows * tokens) * self.wide / self.tp
        work = self.kernels.stream(f"{phase} linear attention", moved)
        # A token decays and updates the state and reads it: three products of the state's size.
        flops = 6.0 * linear.value_heads * linear.key_head_dim * linear.value_head_dim * tokens / self.tp
        compute_s = flops / (self.kernels.gpu.flops("bfloat16") * self.kernels.curves.prefill.efficiency)
        return replace(work, flops=flops, compute_s=compute_s).times(share)

    def _projections(self, tokens: Any) -> list[Work]:
        attention, shard, hidden = self.model.attention, self.shard, self.model.hidden
        query, key = shard.heads * attention.head_dim, shard.kv_heads * attention.head_dim
        value, out = shard.kv_heads * shard.v_dim, shard.heads * shard.v_dim
        gate = out if attention.output_gate else 0
        works = [self.kernels.gemm("qkv projection", tokens, query + gate + key + value, hidden)]
        works.append(self.kernels.gemm("output projection", tokens, hidden, out))
        if self.model.encoder_layers:
            works.append(self.kernels.gemm("cross projection in", tokens, query, hidden))
            works.append(self.kernels.gemm("cross projection out", tokens, hidden, out))
        if not self.model.metadata.learned_positions:
            works.insert(1, self.kernels.stream("rope", 2 * (query + key) * self.wide * tokens))
        return works

    def _latent_projections(self, tokens: Any) -> list[Work]:
        # MLA (arXiv:2405.04434): the up-projection costs the same if it is absorbed into query and output projections.
        attention, shard, hidden = self.model.attention, self.shard, self.model.hidden
        width = attention.head_dim + attention.rope_head_dim
        latent = attention.kv_lora_rank + attention.rope_head_dim
        rank = attention.q_lora_rank
        works = [
            self.kernels.gemm("latent projection", tokens, rank + latent, hidden),
            self.kernels.gemm("query projection", tokens, shard.heads * width, rank or hidden),
            self.kernels.stream("rope", 2 * (shard.heads + 1) * attention.rope_head_dim * self.wide * tokens),
            self._up_projection("kv up-projection", tokens),
            self.output_kernels.gemm("output projection", tokens, hidden, shard.heads * shard.v_dim),
        ]
        if heads := attention.index_heads:  # every GPU has all heads of the indexer
            queries = self.kernels.gemm("indexer projection", tokens, heads * attention.index_head_dim, rank or hidden)
            key = self.kernels.gemm("indexer projection", tokens, attention.index_head_dim + heads, hidden, wide=True)
            # A norm, a rotary embedding, and a quantization of queries and of the key, which is cached.
            rest = self.kernels.stream("indexer", 4 * heads * attention.index_head_dim * self.wide * tokens, kernels=4)
            works.append(total_work("indexer projection", [queries, key, rest]))
        return works

    def _up_projection(self, name: str, tokens: Any) -> Work:
        attention, shard = self.model.attention, self.shard
        width = shard.heads * (attention.head_dim + shard.v_dim)
        return self.kernels.gemm(name, tokens, width, attention.kv_lora_rank)

    def _mlp(self, tokens: Any, intermediate: int, kernels: Kernels) -> list[Work]:
        hidden, width = self.model.hidden, intermediate / self.tp
        into = 2 if self.model.ffn.gated else 1
        return [
            kernels.gemm("mlp up", tokens, into * width, hidden),
            kernels.stream("activation", (into + 1) * width * self.wide * tokens),
            kernels.gemm("mlp down", tokens, hidden, width),
        ]

    def experts_hit(self, tokens: Any) -> Any:
        """Return how many experts ``tokens`` tokens activate on average.

        Of E experts, k for each token, T tokens activate E (1 - (1 - k/E)^(T^a)), where a is ``routing_power``.
        """
        ffn = self.model.ffn
        if (share := ffn.experts_per_token / ffn.experts) >= 1:
            return ffn.experts
        drawn = np.asarray(tokens) ** self.kernels.curves.routing_power
        return ffn.experts * -np.expm1(drawn * math.log1p(-share))

    def busiest(self, tokens: Any) -> tuple[Any, Any]:
        """Return (rows of tokens, activated experts) of the GPU with most tokens; a token is one row for each expert.

        Without expert parallelism all GPUs have a part of every expert, and thus equal rows.
        """
        ffn, parallel = self.model.ffn, self.shard.parallel
        if parallel.ep == 1:
            return tokens * ffn.experts_per_token, self.experts_hit(tokens)
        routing = {"experts": ffn.experts, "experts_per_token": ffn.experts_per_token, "ep": parallel.ep}
        rows, hit = busiest_gpu(tokens, **routing, redundant=parallel.redundant_experts)
        # The drawn popularities agree with the default routing_power; another one hits as many as other tokens do.
        if (power := self.kernels.curves.routing_power) != CURVES.routing_power:
            others = np.maximum(tokens, 1.0) ** (power / CURVES.routing_power)
            hit = np.minimum(tokens, 1.0) * busiest_gpu(others, **routing, redundant=parallel.redundant_experts)[1]
        return rows, hit

    def experts(self, tokens: Any, activated: Any, rows: Any = None) -> list[Work]:
        """Return the work of an MoE layer's router and experts. The tokens activate ``activated`` experts.

        ``rows`` is the number of rows of the busiest GPU; None: one for each token and each of its experts. Where
        every GPU has all tokens, the kernels beside the products pass over all rows, those of other GPUs, too.
        """
        ffn, hidden = self.model.ffn, self.model.hidden
        into = 2 if ffn.gated else 1
        width = ffn.expert_intermediate / self.shard.parallel.gpus_per_expert
        every = tokens * ffn.experts_per_token
        rows = every if rows is None else rows
        is_gathered = self.shard.parallel.all2all_backend == "allgather_reducescatter"
        works = [
            self.kernels.gemm("router", tokens, ffn.experts, hidden, wide=True),
            self.expert_kernels.grouped_gemm("experts up", rows, activated, into * width, hidden),
            self.kernels.stream("expert activation", (into + 1) * width * self.wide * (every if is_gathered else rows)),
            self.expert_kernels.grouped_gemm("experts down", rows, activated, hidden, width),
        ]
        if self.shard.parallel.ep > 1 and is_gathered:
            works.append(self.kernels.stream("expert sum", hidden * self.wide * every))
        return works

    def _routed(self, tokens: Any) -> list[Work]:
        rows, activated = self.busiest(tokens)
        return self.experts(tokens, activated, rows)

    def _moe(self, tokens: Any) -> list[Work]:
        ffn, works = self.model.ffn, self._routed(tokens)
        if self.dp > 1:  # The other operators of the routed experts are ``shared``.
            works = works[:1]
        if ffn.shared_intermediate:
            shared = self._mlp(tokens, ffn.shared_intermediate, self.second_stream)
            works += [replace(work, name=f"shared {work.name}") for work in shared]
        return works

    def _prefill(self, name: str, chunk: Any, context: Any, window: int | None) -> Work:
        if self.model.encoder_layers:
            pairs, keys = chunk * (context + chunk), context + chunk
        else:
            pairs, keys = causal_pairs(chunk, context, window or np.inf)
        attention, shard = self.model.attention, self.shard
        width = attention.head_dim + attention.rope_head_dim
        read = keys * (shard.heads * (width + shard.v_dim) * self.wide if self.is_mla else shard.kv_bytes)
        return self.kernels.prefill(
            name,
            pairs=pairs,
            mean_keys=pairs / np.maximum(chunk, 1),
            keys=keys,
            head_flops=2.0 * shard.heads * (width + shard.v_dim),
            moved_bytes=read + shard.heads * (width + shard.v_dim) * self.wide * chunk,
        )

    def _decode(self, name: str, seqs: Any, keys: Any) -> Work:
        attention, shard = self.model.attention, self.shard
        if self.is_mla:
            width, group = 2 * attention.kv_lora_rank + attention.rope_head_dim, shard.heads
        else:
            width, group = attention.head_dim + shard.v_dim, shard.heads / shard.kv_heads
        return self.kernels.decode(
            name,
            seqs=seqs,
            keys=keys,
            head_flops=2.0 * shard.heads * width,
            moved_bytes=keys * shard.kv_bytes + shard.heads * width * self.wide * seqs,
            group=group,
        )

    def _all_reduce(self, name: str, elements: Any) -> Work:
        """Return the work of a ring all-reduce over n GPUs. Each GPU sends ``2 (n - 1) / n`` of the data."""
        return self._network(name, 2 * (self.tp - 1) / self.tp * elements * self.wide)

    def _network(self, name: str, sent_bytes: Any) -> Work:
        link, latency_s = small_message(self.node, self.tp)
        return Work(name, bytes=sent_bytes, network_s=sent_bytes / link.bandwidth_bytes_per_s, latency_s=latency_s)


def small_message(node: NodeSpec, gpus: int) -> tuple[LinkSpec, float]:
    """Return the link that a collective over ``gpus`` GPUs uses, and the seconds of the smallest message."""
    # Where one link joins all GPUs, they write directly to each other's memory (vLLM's custom all-reduce): one
    # message, and DIRECT_HOP_S for each doubling of the GPUs. Elsewhere NCCL's tree passes messages up and down.
    link, hops = node.link_for(gpus), math.log2(max(gpus, 1))
    return link, link.latency_s + DIRECT_HOP_S * hops if gpus <= node.link_group else 2 * hops * link.latency_s


def causal_pairs(chunk: Any, context: Any, window: Any = np.inf) -> tuple[Any, Any]:
    """Return (number of (query, key) pairs of a causal chunk, number of keys that at least one query sees)."""
    # A query at position p sees min(p + 1, window) keys.
    growing = np.clip(window - context, 0, chunk)
    full = (chunk - growing) * np.where(np.isfinite(window), window, 0.0)
    return growing * (context + (growing + 1) / 2) + full, chunk + np.minimum(context, window)
