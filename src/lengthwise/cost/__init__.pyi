from .memory import largest_model_len, plan_memory
from .provenance import MadeFor, made_for, require_made_for
from .roofline_tables import (
    ENGINE_HOSTS,
    HOST_NAMES,
    HostOverhead,
    OperatorTime,
    host_overhead,
    operators,
    roofline,
    roofline_note,
    with_host,
)
from .tables import FitReport, OperatorFit, from_tables, load, save
from .vidur import vidur_profile
from .vidur_format import vidur_tables

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
