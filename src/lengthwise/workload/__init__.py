"""Where requests come from: arrivals, lengths, presets, traces."""

from lengthwise.workload.arrivals import (
    AllAtOnce,
    Arrivals,
    ClosedLoop,
    Constant,
    Gamma,
    Poisson,
    RateProfile,
    Replay,
    Weibull,
    elis_gamma,
)
from lengthwise.workload.generate import generate
from lengthwise.workload.lengths import Capped, Conditional, Joint, Lengths, Samples
from lengthwise.workload.marginals import (
    Empirical,
    Fixed,
    LogNormal,
    Marginal,
    Quantiles,
    SkewNormal,
    TruncatedNormal,
    Uniform,
    Zipf,
)
from lengthwise.workload.presets import Preset, preset, presets

__all__ = [
    "AllAtOnce",
    "Arrivals",
    "Capped",
    "ClosedLoop",
    "Conditional",
    "Constant",
    "Empirical",
    "Fixed",
    "Gamma",
    "Joint",
    "Lengths",
    "LogNormal",
    "Marginal",
    "Poisson",
    "Preset",
    "Quantiles",
    "RateProfile",
    "Replay",
    "Samples",
    "SkewNormal",
    "TruncatedNormal",
    "Uniform",
    "Weibull",
    "Zipf",
    "elis_gamma",
    "generate",
    "preset",
    "presets",
]
