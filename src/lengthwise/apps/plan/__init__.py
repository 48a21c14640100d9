"""Which models run when, on how many GPUs each, so that all is done soonest."""

from lengthwise.apps.plan.beam import METHODS, Effort
from lengthwise.apps.plan.exact import best_staged, best_unpreempted
from lengthwise.apps.plan.plan_file import read_plan, write_plan
from lengthwise.apps.plan.planner import DEFAULT, Asked, plan
from lengthwise.apps.plan.space import Served, Space
from lengthwise.apps.plan.switching import SwitchRates, SwitchTimes, read_switch_times, write_switch_times
from lengthwise.apps.plan.what_if import what_if

__all__ = [
    "DEFAULT",
    "METHODS",
    "Asked",
    "Effort",
    "Served",
    "Space",
    "SwitchRates",
    "SwitchTimes",
    "best_staged",
    "best_unpreempted",
    "plan",
    "read_plan",
    "read_switch_times",
    "what_if",
    "write_plan",
    "write_switch_times",
]
