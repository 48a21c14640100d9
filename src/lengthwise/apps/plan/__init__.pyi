from .methods import METHODS, Effort, best_staged, best_unpreempted
from .planner import DEFAULT, PLAN_FORMAT, PlanOptions, plan, what_if, write_plan
from .space import Served, Space, SwitchRates, SwitchTimes, write_switch_times

__all__ = [
    "DEFAULT",
    "METHODS",
    "PLAN_FORMAT",
    "Effort",
    "PlanOptions",
    "Served",
    "Space",
    "SwitchRates",
    "SwitchTimes",
    "best_staged",
    "best_unpreempted",
    "plan",
    "what_if",
    "write_plan",
    "write_switch_times",
]
