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
from lengthwise.workload.describe import Description, Histogram, LengthSummary, describe
from lengthwise.workload.generate import generate
from lengthwise.workload.lengths import Capped, Conditional, Drawn, Joint, Lengths, Samples, draw
from lengthwise.workload.marginals import (
    Fixed,
    LogNormal,
    Marginal,
    SkewNormal,
    TruncatedNormal,
    Uniform,
    Zipf,
)
from lengthwise.workload.presets import Preset, preset, presets
from lengthwise.workload.read import READABLE, detect, read
from lengthwise.workload.tables import Empirical, Quantiles
from lengthwise.workload.write import WRITABLE, write

__all__ = [
    "READABLE",
    "WRITABLE",
    "AllAtOnce",
    "Arrivals",
    "Capped",
    "ClosedLoop",
    "Conditional",
    "Constant",
    "Description",
    "Drawn",
    "Empirical",
    "Fixed",
    "Gamma",
    "Histogram",
    "Joint",
    "LengthSummary",
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
    "describe",
    "detect",
    "draw",
    "elis_gamma",
    "generate",
    "preset",
    "presets",
    "read",
    "write",
]
