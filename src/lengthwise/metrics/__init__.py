"""From records to numbers: latencies, goodput, utilisation, cost, each with its interval."""

from lengthwise.metrics._compare_result import Comparison, MetricDistance, MetricError, Side
from lengthwise.metrics._describe import weighted_quantiles
from lengthwise.metrics._intervals import over_seeds, t_quantile
from lengthwise.metrics.columns import frame, request_column, request_columns
from lengthwise.metrics.combine import combine, difference
from lengthwise.metrics.compare import LATENCIES, STATS, compare
from lengthwise.metrics.estimate import QUANTILES, STATISTICS, Distribution
from lengthwise.metrics.hardware import (
    SHARES,
    Cost,
    Hardware,
    gpu_power_w,
    hardware_of,
    model_flops,
    moved_bytes,
)
from lengthwise.metrics.model_error import with_model_error
from lengthwise.metrics.reach import Beyond, beyond_reach, worst_of
from lengthwise.metrics.slo import Slo
from lengthwise.metrics.summarize import summarize
from lengthwise.metrics.summary import Counts, Goodput, Rates, Summary
from lengthwise.schema.estimate import Estimate

__all__ = [
    "LATENCIES",
    "QUANTILES",
    "SHARES",
    "STATISTICS",
    "STATS",
    "Beyond",
    "Comparison",
    "Cost",
    "Counts",
    "Distribution",
    "Estimate",
    "Goodput",
    "Hardware",
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
    "over_seeds",
    "request_column",
    "request_columns",
    "summarize",
    "t_quantile",
    "weighted_quantiles",
    "with_model_error",
    "worst_of",
]
