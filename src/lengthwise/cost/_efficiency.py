"""How near a GPU comes to its data sheet: one family of curves for every GPU.

Time is ``(compute**4 + memory**4) ** (1/4) + network + latency``: the roofline (Williams et al.,
2009) with a rounded ridge. Padding a matrix dimension by a constant makes small shapes
inefficient, keeps time affine in each dimension, and hence never decreasing.

The constants are least-squares fits of log time, shared by all GPUs so that an unmeasured GPU is
no worse than a measured one. Data: AIConfigurator's tables of vLLM 0.14-0.24 kernels (Apache-2.0,
github.com/ai-dynamo/aiconfigurator), Vidur's operator profiles (MIT, github.com/microsoft/vidur),
and LLMServingSim's profile of vLLM 0.19 (MIT, github.com/casys-kaist/LLMServingSim). Median
(95th percentile) relative error:

====================  =================================================================
16-bit GEMM           A100 10 (28) %, H100 11 (27) %, H200 10 (28) %, B200 9 (41) %;
                      Vidur's projections A100 7 (21) %, H100 12 (32) %, A40 6 (23) %
FP8, NVFP4 GEMM       FP8 H100 11 (35) %, H200 14 (39) %, B200 12 (50) %; NVFP4 14 (39) %
prefill attention     A100 11 (32) %, H100 9 (37) %, H200 8 (35) %, B200 13 (37) %
decode attention      A100 24 (48) %, H100 8 (33) %, H200 8 (31) %, B200 24 (76) %
fused MoE             A100 22 (47) %, H100 18 (70) %
all-reduce            A100 17 (46) %, H100 20 (50) % (_operators.py)
====================  =================================================================

Together, with vLLM's host (roofline.ENGINE_HOSTS), they give the time per output token of Llama-3.1-70B in FP8 and
NVFP4 on 1 to 8 GPUs (AIConfigurator's silicon samples) within 4 (15) % on H100, 7 (16) % on H200, 7 (14) % on B200;
of DeepSeek-V3 in SGLang on 8 H200 within 9 (15) %, of Kimi K2 in int4 within 14 (20) %, and of Llama in TensorRT-LLM,
whose kernels are faster, within 26 (45) % on H200, 9 (28) % on B200.
tests/cost/test_roofline_accuracy.py repeats the comparison where the data are at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lengthwise.schema.cost_tables import Floats
from lengthwise.schema.hardware import GpuSpec
from lengthwise.schema.units import DTYPE_BYTES, dtype_name

RIDGE = 4
SCALE_BYTES = {"fp4": 1 / 16, "int4": 2.5 / 128}
"""Bytes of scales read with a weight: NVFP4 has one of 8 bits for 16, AWQ 16 bits and a 4-bit zero for 128."""


@dataclass(frozen=True)
class GemmCurve:
    """Share of peak FLOP/s of a large GEMM, padding of m, n, k, and seconds of a launch."""

    efficiency: float
    pad_m: float
    pad_n: float
    pad_k: float
    latency_s: float
    memory_efficiency: float = 0.8


@dataclass(frozen=True)
class StreamCurve:
    """Element-wise kernels: 0.4-0.9 of the bandwidth and 1.2-2.8 us on Vidur's A100, H100 and A40."""

    memory_efficiency: float = 0.6
    latency_s: float = 2.4e-6


@dataclass(frozen=True)
class PrefillCurve:
    """FlashAttention.

    One block of threads walks all keys of its queries: ``serial_s`` a key, however short the chunk.
    """

    efficiency: float = 0.54
    pad_tokens: float = 190
    latency_s: float = 12e-6
    serial_s: float = 2e-8
    memory_efficiency: float = 0.8


@dataclass(frozen=True)
class DecodeCurve:
    """A tile holds 64 query rows; a group of g query heads fills g of them, and 64 of g + 64 in general.

    0.7 of the peak is what FlashMLA reports for groups of 128 (660 of 989 TFLOP/s,
    github.com/deepseek-ai/FlashMLA).
    """

    efficiency: float = 0.7
    tile_rows: float = 64
    latency_s: float = 11.7e-6
    sequence_s: float = 3e-8
    memory_efficiency: float = 0.8


@dataclass(frozen=True)
class Curves:
    """The constants of every kind of kernel; the defaults are those that the roofline ships.

    ``routing_power``: experts are not chosen evenly, so that T tokens hit as many as T**0.96 drawn evenly would:
    what 218 points of DeepSeek-V3 and Kimi K2 say (benchmarks/_silicon_fit.py).
    """

    wide: GemmCurve = GemmCurve(0.82, 80, 80, 96, 4e-6)
    narrow: GemmCurve = GemmCurve(0.72, 120, 2400, 400, 6e-6)
    grouped: GemmCurve = GemmCurve(0.6, 40, 80, 96, 10e-6, 0.7)
    stream: StreamCurve = StreamCurve()
    prefill: PrefillCurve = PrefillCurve()
    decode: DecodeCurve = DecodeCurve()
    routing_power: float = 0.96


CURVES = Curves()


@dataclass(frozen=True)
class Work:
    """What one operator does; every field but the name is a number or an array of one shape."""

    name: str
    flops: Any = 0.0
    bytes: Any = 0.0
    compute_s: Any = 0.0
    memory_s: Any = 0.0
    network_s: Any = 0.0
    latency_s: Any = 0.0

    @property
    def seconds(self) -> Floats:
        """Compute and memory overlap, network and launch do not."""
        ridge = (np.asarray(self.compute_s) ** RIDGE + np.asarray(self.memory_s) ** RIDGE) ** (1 / RIDGE)
        return np.asarray(ridge + self.network_s + self.latency_s, dtype=np.float64)

    def times(self, factor: Any) -> Work:
        """The same operator ``factor`` times; also a share of a layer."""
        names = ("flops", "bytes", "compute_s", "memory_s", "network_s", "latency_s")
        return replace(self, **{name: factor * getattr(self, name) for name in names})


@dataclass(frozen=True)
class Kernels:
    """A GPU as the time of its kernels, for one dtype of weights.

    Weights in a format that the GPU has no units for are read in that format and multiplied at
    16 bits, as are int4 weights everywhere (W4A16). Activations have ``wide_bytes``.
    """

    gpu: GpuSpec
    weight_dtype: str
    wide_bytes: float = 2.0
    curves: Curves = CURVES

    def gemm(self, name: str, m: Any, n: float, k: float, *, wide: bool = False) -> Work:
        """An [m, k] by [k, n] product; ``wide`` keeps 16-bit weights (embedding, head)."""
        return self._gemm(name, (m, 1.0), n, k, self._curve(wide), wide=wide)

    def grouped_gemm(self, name: str, m: Any, groups: Any, n: float, k: float) -> Work:
        """``groups`` products over m rows in all, each with its own [k, n] weights (fused MoE)."""
        return self._gemm(name, (m, groups), n, k, self.curves.grouped, wide=False)

    def _gemm(
        self, name: str, rows: tuple[Any, Any], n: float, k: float, curve: GemmCurve, *, wide: bool
    ) -> Work:
        m, groups = rows
        moved = groups * n * k * self._weight_bytes(wide) + self.wide_bytes * m * (n + k)
        padded = 2.0 * (m + curve.pad_m * groups) * (n + curve.pad_n) * (k + curve.pad_k)
        return Work(
            name,
            flops=2.0 * m * n * k,
            bytes=moved,
            compute_s=padded / (self._peak(wide) * curve.efficiency),
            memory_s=moved / (self.gpu.bandwidth_bytes_per_s * curve.memory_efficiency),
            latency_s=curve.latency_s,
        )

    def stream(self, name: str, moved_bytes: Any, *, kernels: int = 1, latency_s: Any = None) -> Work:
        """``kernels`` element-wise kernels that read and write so many bytes in all."""
        curve = self.curves.stream
        bandwidth = self.gpu.bandwidth_bytes_per_s * curve.memory_efficiency
        each_s = curve.latency_s if latency_s is None else latency_s
        return Work(name, bytes=moved_bytes, memory_s=moved_bytes / bandwidth, latency_s=kernels * each_s)

    def prefill(
        self, name: str, *, pairs: Any, mean_keys: Any, keys: Any, head_flops: float, moved: Any
    ) -> Work:
        """FlashAttention over ``pairs`` of (query, key), each of ``head_flops`` FLOPs over all heads.

        Padding the queries adds ``mean_keys`` pairs each: the keys that a query sees on average.
        """
        curve = self.curves.prefill
        padded = pairs + curve.pad_tokens * (mean_keys + curve.pad_tokens / 2)
        memory_s = moved / (self.gpu.bandwidth_bytes_per_s * curve.memory_efficiency)
        return Work(
            name,
            flops=head_flops * pairs,
            bytes=moved,
            compute_s=head_flops * padded / (self._peak(wide=True) * curve.efficiency),
            memory_s=(memory_s**RIDGE + (curve.serial_s * keys) ** RIDGE) ** (1 / RIDGE),
            latency_s=curve.latency_s,
        )

    def decode(self, name: str, *, seqs: Any, keys: Any, head_flops: float, moved: Any, group: float) -> Work:
        """One query a sequence over ``keys`` cached tokens in all; ``group`` heads share a KV head."""
        curve = self.curves.decode
        tile = group / (group + curve.tile_rows)
        return Work(
            name,
            flops=head_flops * keys,
            bytes=moved,
            compute_s=head_flops * keys / (self._peak(wide=True) * curve.efficiency * tile),
            memory_s=moved / (self.gpu.bandwidth_bytes_per_s * curve.memory_efficiency),
            latency_s=curve.latency_s + curve.sequence_s * seqs,
        )

    def _curve(self, wide: bool) -> GemmCurve:
        return self.curves.narrow if self._peak(wide) > self._peak(wide=True) else self.curves.wide

    def _peak(self, wide: bool) -> float:
        if wide or self.weight_dtype == "int4":
            return self.gpu.flops("float32" if self.wide_bytes > DTYPE_BYTES["bfloat16"] else "bfloat16")
        return self.gpu.flops(self.weight_dtype)

    def _weight_bytes(self, wide: bool) -> float:
        return (
            self.wide_bytes
            if wide
            else DTYPE_BYTES[self.weight_dtype] + SCALE_BYTES.get(self.weight_dtype, 0.0)
        )


def kernels_of(gpu: GpuSpec, weight_dtype: str) -> Kernels:
    """The kernels of a GPU for weights of a dtype, in any of its spellings."""
    name = dtype_name(weight_dtype)
    return Kernels(gpu, name, max(2.0, DTYPE_BYTES[name]))
