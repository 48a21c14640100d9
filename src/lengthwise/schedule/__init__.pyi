from .adaptation import Adapter, Terms, redeployment, replan
from .baselines import SYSTEMS, curve
from .choose import Choice, Planner, best_schedule, tensor_degrees
from .configurations import Curve
from .controls import Assumptions, Cluster, ControlColumns, Controls, Strategy, columns
from .drift_monitor import Alarm, Monitor, Watcher
from .engine_support import Cut, Runnable, runnable
from .estimation import Estimates, Estimator, Reason, estimate
from .frontier import StaticBatches, breakpoints, frontiers, static_batches
from .full_answer import Explanation, Progress, answer, explain
from .length_drift import Sample, banded, drift, over_costs, over_resamples
from .lengths import TaskLengths
from .optimizer import (
    Block,
    Found,
    NonMonotone,
    Perf,
    Performance,
    Reached,
    Tolerances,
    Variable,
    branch_and_bound,
    exhaustive,
    least_tolerances,
    non_monotone,
)
from .stage_costs import cluster_tables

__all__ = ["SYSTEMS", "Adapter", "Alarm", "Assumptions", "Block", "Choice", "Cluster", "ControlColumns", "Controls", "Curve", "Cut", "Estimates", "Estimator", "Explanation", "Found", "Monitor", "NonMonotone", "Perf", "Performance", "Planner", "Progress", "Reached", "Reason", "Runnable", "Sample", "StaticBatches", "Strategy", "TaskLengths", "Terms", "Tolerances", "Variable", "Watcher", "answer", "banded", "best_schedule", "branch_and_bound", "breakpoints", "cluster_tables", "columns", "curve", "drift", "estimate", "exhaustive", "explain", "frontiers", "least_tolerances", "non_monotone", "over_costs", "over_resamples", "redeployment", "replan", "runnable", "static_batches", "tensor_degrees"]
