from .arrivals import (
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
from .distributions import Empirical, Fixed, LogNormal, Marginal, Quantiles, SkewNormal, TruncatedNormal, Uniform, Zipf
from .lengths import Capped, Conditional, Drawn, Joint, Lengths, Samples, draw
from .preset_files import Preset, generate, preset, presets
from .readers import READABLE, detect, read
from .summary import Description, Histogram, LengthSummary, describe
from .writers import WRITABLE, write

__all__ = ["READABLE", "WRITABLE", "AllAtOnce", "Arrivals", "Capped", "ClosedLoop", "Conditional", "Constant", "Description", "Drawn", "Empirical", "Fixed", "Gamma", "Histogram", "Joint", "LengthSummary", "Lengths", "LogNormal", "Marginal", "Poisson", "Preset", "Quantiles", "RateProfile", "Replay", "Samples", "SkewNormal", "TruncatedNormal", "Uniform", "Weibull", "Zipf", "describe", "detect", "draw", "elis_gamma", "generate", "preset", "presets", "read", "write"]
