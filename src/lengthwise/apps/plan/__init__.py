"""Which models run when, on how many GPUs each, so that all is done soonest."""

from lengthwise.apps.plan.beam import METHODS, Effort
from lengthwise.apps.plan.planner import DEFAULT, Asked, plan
from lengthwise.apps.plan.space import Served, Space
from lengthwise.apps.plan.switching import SwitchRates, SwitchTimes, read_switch_times, write_switch_times

__all__ = [
    "DEFAULT",
    "METHODS",
    "Asked",
    "Effort",
    "Served",
    "Space",
    "SwitchRates",
    "SwitchTimes",
    "plan",
    "read_switch_times",
    "write_switch_times",
]
