"""Which deployment: the cheapest that keeps the promises."""

from lengthwise.search._bayesian import Bayesian
from lengthwise.search._run import Run
from lengthwise.search.bench import REPLICAS, Bench, sized
from lengthwise.search.capacity import Capacity, capacity
from lengthwise.search.curve import point_at_capacity
from lengthwise.search.limits import Promises, with_stability
from lengthwise.search.limits import check as check_limit
from lengthwise.search.load import Load
from lengthwise.search.objectives import OBJECTIVES, UNLIMITED_GPUS, Question, objective
from lengthwise.search.search import Options, search
from lengthwise.search.space import Space, checked
from lengthwise.search.store import Store, code_version, content_key
from lengthwise.search.study import study
from lengthwise.search.workers import available_cpus, processes, ray, threads

__all__ = [
    "OBJECTIVES",
    "REPLICAS",
    "UNLIMITED_GPUS",
    "Bayesian",
    "Bench",
    "Capacity",
    "Load",
    "Options",
    "Promises",
    "Question",
    "Run",
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
    "with_stability",
]
