from .capacity_search import Capacity, capacity, point_at_capacity, with_model_error
from .configuration_search import Options, Run, search, study
from .limits import OBJECTIVES, UNLIMITED_GPUS, Question, SloLimits, check_limit, objective, with_stability
from .load import Load
from .objectives import REPLICAS, AtCapacity, Bench, sized
from .space import Space, checked
from .store import Store, code_version, content_key
from .strategy import Bayesian
from .workers import available_cpus, processes, ray, threads

__all__ = [
    "OBJECTIVES",
    "REPLICAS",
    "UNLIMITED_GPUS",
    "AtCapacity",
    "Bayesian",
    "Bench",
    "Capacity",
    "Load",
    "Options",
    "Question",
    "Run",
    "SloLimits",
    "Space",
    "Store",
    "available_cpus",
    "capacity",
    "check_limit",
    "checked",
    "code_version",
    "content_key",
    "objective",
    "point_at_capacity",
    "processes",
    "ray",
    "search",
    "sized",
    "study",
    "threads",
    "with_model_error",
    "with_stability",
]
