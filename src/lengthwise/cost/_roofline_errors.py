"""How far the roofline's parts may be off as a whole: from its published fits, see ``_efficiency``.

The fits say the median and the 95th percentile of the relative error over measured points. A normal law of
the log with the same median, or the same 95th percentile if that is wider, has the ``log_sd`` of a part. Taken
as one factor for all steps that is cautious: errors of points partly cancel in a run. It agrees with what is
known of whole runs: drawn together these errors move the time per output token of a 70B in FP8 on 2, 4 and 8 H100
(16 requests at a time) with a log_sd of 0.14, 0.13 and 0.13, and 225 deployments of AIConfigurator's samples lie
within 9 % at the median, 25 % at the 95th percentile (log_sd 0.13).

A GPU that no fit has seen gets wider errors than any that has (``_roofline_reach``). Three parts were never measured
alone: element-wise kernels reach 0.4 to 0.9 of the bandwidth where 0.6 is taken; a send is taken for as uncertain as
an all-reduce; the host differs from engine to engine by more than from machine to machine, so that 0.5 (a
factor of 2.3 within 90 %) is an assumption, and says so here. So is 0.7 of the front before an engine: between
engines and kinds of models its fits go from 18 to 88 ms, about a factor of 4, two standard deviations. A request's own
delay may be longer by far more than shorter, since engines told to gather prompts or to look for new ones every few
steps add to it what no table knows: with 1.6 on that side nearest to one in twenty first tokens came later than said
(in steps of 0.1), over 280 of 570 deployments of InferenceMAX (Apache-2.0): Llama-3.1-70B on B200, DeepSeek-V3 on H200.
It was checked on the others (``benchmarks/_front_spread.py``). One number for all engines: a spread fitted for each on
its own did not carry over to the other half.
"""

from __future__ import annotations

import math
import statistics

from lengthwise.cost import _roofline_reach as reach
from lengthwise.schema.cost_tables import Front, PartError
from lengthwise.schema.hardware import GpuSpec
from lengthwise.schema.model import ModelSpec
from lengthwise.schema.units import DTYPE_BYTES, dtype_name

Fits = dict[str, tuple[float, float]]

WIDE_GEMM: Fits = {
    "A100": (0.10, 0.28),
    "H100": (0.11, 0.27),
    "H200": (0.10, 0.28),
    "B200": (0.09, 0.41),
    "A40": (0.06, 0.23),
}
NARROW_GEMM: Fits = {"H100": (0.11, 0.35), "H200": (0.14, 0.39), "B200": (0.15, 0.50)}
PREFILL: Fits = {"A100": (0.11, 0.32), "H100": (0.09, 0.37), "H200": (0.08, 0.35), "B200": (0.13, 0.37)}
DECODE: Fits = {"A100": (0.24, 0.48), "H100": (0.08, 0.33), "H200": (0.08, 0.31), "B200": (0.24, 0.76)}
MOE: Fits = {"A100": (0.22, 0.47), "H100": (0.18, 0.70)}
ALL_REDUCE: Fits = {"A100": (0.17, 0.46), "H100": (0.20, 0.50)}
"""(median, 95th percentile) of the relative error, by GPU."""

STREAM_LOG_SD = math.log(0.9 / 0.6) / 1.96
HOST_LOG_SD, FRONT_LOG_SD, FRONT_SLOW_LOG_SD = 0.5, 0.7, 1.6
_MEDIAN, _P95 = 0.6745, 1.96
"""Quantiles of the absolute value of a standard normal."""


def roofline_errors(model: ModelSpec, gpu: GpuSpec, weight_dtype: str) -> tuple[PartError, ...]:
    """The errors of the parts of a roofline's tables."""
    narrow = DTYPE_BYTES[dtype_name(weight_dtype)] < DTYPE_BYTES["bfloat16"]
    gemm = log_sd(NARROW_GEMM if narrow else WIDE_GEMM, gpu)
    comm = log_sd(ALL_REDUCE, gpu)
    return (
        PartError("layer", max(gemm, log_sd(MOE, gpu)) if model.ffn.experts else gemm),
        PartError("comm", comm),
        PartError("first", round(STREAM_LOG_SD * reach.factor(gpu), 3)),
        PartError("send", comm),
        PartError("head", log_sd(WIDE_GEMM, gpu)),
        PartError("host", HOST_LOG_SD),
        PartError("prefill", log_sd(PREFILL, gpu)),
        PartError("decode", log_sd(DECODE, gpu)),
        *reach.whole_steps(gpu),
    )


def with_front_error(errors: tuple[PartError, ...], front: Front) -> tuple[PartError, ...]:
    """The errors with that of a front that is taken from elsewhere; without one where nothing waits there."""
    others = tuple(error for error in errors if error.part != "front")
    return others if front == Front() else (*others, PartError("front", FRONT_LOG_SD, FRONT_SLOW_LOG_SD))


def log_sd(fits: Fits, gpu: GpuSpec) -> float:
    """Of a fit for this GPU; the widest of all where there is none, or a typical one carried to another GPU."""
    family = reach.family(gpu)
    known = [fits[family]] if family in fits else fits.values()
    sds = [max(math.log1p(median) / _MEDIAN, math.log1p(p95) / _P95) for median, p95 in known]
    return round(max(*sds, reach.factor(gpu) * statistics.median(sds)) if len(sds) > 1 else sds[0], 3)
