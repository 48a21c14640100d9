from .columns import frame, request_column, request_columns
from .comparison import LATENCIES, STATS, Comparison, MetricDistance, MetricError, Side, compare
from .distribution import QUANTILES, STATISTICS, Distribution, weighted_quantiles
from .extrapolation import Extrapolation, beyond_reach, worst_of
from .hardware import SHARES, Cost, Hardware, gpu_power_w, hardware_of, model_flops, moved_bytes
from .pooling import combine, difference, with_model_error
from .summary import Counts, Goodput, Intervals, Rates, Slo, Summary, summarize

__all__ = [
    "LATENCIES",
    "QUANTILES",
    "SHARES",
    "STATISTICS",
    "STATS",
    "Comparison",
    "Cost",
    "Counts",
    "Distribution",
    "Extrapolation",
    "Goodput",
    "Hardware",
    "Intervals",
    "MetricDistance",
    "MetricError",
    "Rates",
    "Side",
    "Slo",
    "Summary",
    "beyond_reach",
    "combine",
    "compare",
    "difference",
    "frame",
    "gpu_power_w",
    "hardware_of",
    "model_flops",
    "moved_bytes",
    "request_column",
    "request_columns",
    "summarize",
    "weighted_quantiles",
    "with_model_error",
    "worst_of",
]
