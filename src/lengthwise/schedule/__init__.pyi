from .adaptation import Adapter, ReplanOptions, redeployment, replan
from .baselines import SYSTEMS, Curve, curve
from .controls import Assumptions, Cluster, ControlColumns, Controls, Strategy, columns
from .drift_monitor import Alarm, Monitor, Watcher
from .engine_support import EngineShape, Runnable, runnable
from .estimation import Estimates, Estimator, Reason
from .frontier import StaticBatches, breakpoints, frontiers, static_batches
from .length_drift import Sample, banded, drift, over_costs, over_resamples
from .lengths import TaskLengths
from .optimizer import (
    EvaluatedPoint,
    NonMonotone,
    Perf,
    Performance,
    SearchResult,
    Tolerances,
    Variable,
    branch_and_bound,
    exhaustive,
    non_monotone,
)
from .plan import Explanation, Progress, build_plan, explain
from .planner import Choice, Planner, best_schedule, tensor_degrees
from .stage_costs import cluster_tables

__all__ = [
    "SYSTEMS",
    "Adapter",
    "Alarm",
    "Assumptions",
    "Choice",
    "Cluster",
    "ControlColumns",
    "Controls",
    "Curve",
    "EngineShape",
    "Estimates",
    "Estimator",
    "EvaluatedPoint",
    "Explanation",
    "Monitor",
    "NonMonotone",
    "Perf",
    "Performance",
    "Planner",
    "Progress",
    "Reason",
    "ReplanOptions",
    "Runnable",
    "Sample",
    "SearchResult",
    "StaticBatches",
    "Strategy",
    "TaskLengths",
    "Tolerances",
    "Variable",
    "Watcher",
    "banded",
    "best_schedule",
    "branch_and_bound",
    "breakpoints",
    "build_plan",
    "cluster_tables",
    "columns",
    "curve",
    "drift",
    "exhaustive",
    "explain",
    "frontiers",
    "non_monotone",
    "over_costs",
    "over_resamples",
    "redeployment",
    "replan",
    "runnable",
    "static_batches",
    "tensor_degrees",
]
