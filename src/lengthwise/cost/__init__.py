"""What an iteration costs and what fits: every source of timing compiles to the same tables."""

from lengthwise.cost._hosts import HOST_NAMES, host_overhead, with_host
from lengthwise.cost._made_for import MadeFor, made_for, require_made_for
from lengthwise.cost._profile_report import FitReport, OperatorFit
from lengthwise.cost._roofline_reach import roofline_note
from lengthwise.cost._vidur_rule import vidur_tables
from lengthwise.cost.memory import largest_model_len, plan_memory
from lengthwise.cost.roofline import ENGINE_HOSTS, HostOverhead, OperatorTime, operators, roofline
from lengthwise.cost.tables import from_tables, load, save
from lengthwise.cost.vidur import vidur_profile

__all__ = [
    "ENGINE_HOSTS",
    "HOST_NAMES",
    "FitReport",
    "HostOverhead",
    "MadeFor",
    "OperatorFit",
    "OperatorTime",
    "from_tables",
    "host_overhead",
    "largest_model_len",
    "load",
    "made_for",
    "operators",
    "plan_memory",
    "require_made_for",
    "roofline",
    "roofline_note",
    "save",
    "vidur_profile",
    "vidur_tables",
    "with_host",
]
