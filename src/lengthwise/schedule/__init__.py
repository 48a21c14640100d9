"""The best schedule under a latency bound: RRA, WAA, what they take and what they yield."""

from lengthwise.schedule._others import Progress
from lengthwise.schedule.adapt import Adapter
from lengthwise.schedule.answer import answer
from lengthwise.schedule.baselines import SYSTEMS, Curve, curve
from lengthwise.schedule.branch_and_bound import Tolerances, branch_and_bound
from lengthwise.schedule.choose import Choice, Planner, best_schedule, tensor_degrees
from lengthwise.schedule.controls import Assumptions, Cluster, ControlColumns, Controls, Strategy, columns
from lengthwise.schedule.drift import drift
from lengthwise.schedule.estimate import Estimator, estimate
from lengthwise.schedule.estimates import Estimates, Reason
from lengthwise.schedule.exhaustive import exhaustive
from lengthwise.schedule.explain import Explanation, explain
from lengthwise.schedule.found import Block, Found, Reached
from lengthwise.schedule.frontier import frontiers, kinks
from lengthwise.schedule.lengths import TaskLengths
from lengthwise.schedule.monotone import NonMonotone, least_tolerances, non_monotone
from lengthwise.schedule.redeploy import redeployment
from lengthwise.schedule.replan import Terms, replan
from lengthwise.schedule.runnable import Cut, Runnable, runnable
from lengthwise.schedule.stage_seconds import cluster_tables
from lengthwise.schedule.static import StaticBatches, static_batches
from lengthwise.schedule.uncertainty import Sample, banded, over_costs, over_resamples
from lengthwise.schedule.variables import Perf, Performance, Variable
from lengthwise.schedule.watch import Alarm, Watch, Watcher

__all__ = [
    "SYSTEMS",
    "Adapter",
    "Alarm",
    "Assumptions",
    "Block",
    "Choice",
    "Cluster",
    "ControlColumns",
    "Controls",
    "Curve",
    "Cut",
    "Estimates",
    "Estimator",
    "Explanation",
    "Found",
    "NonMonotone",
    "Perf",
    "Performance",
    "Planner",
    "Progress",
    "Reached",
    "Reason",
    "Runnable",
    "Sample",
    "StaticBatches",
    "Strategy",
    "TaskLengths",
    "Terms",
    "Tolerances",
    "Variable",
    "Watch",
    "Watcher",
    "answer",
    "banded",
    "best_schedule",
    "branch_and_bound",
    "cluster_tables",
    "columns",
    "curve",
    "drift",
    "estimate",
    "exhaustive",
    "explain",
    "frontiers",
    "kinks",
    "least_tolerances",
    "non_monotone",
    "over_costs",
    "over_resamples",
    "redeployment",
    "replan",
    "runnable",
    "static_batches",
    "tensor_degrees",
]
