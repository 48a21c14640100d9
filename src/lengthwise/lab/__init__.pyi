from .decisions import answer, decision, gap_closed, ratio
from .experiment import Bench, Contestant, Each, Question, ends, lab, one_by_one

__all__ = [
    "Bench",
    "Contestant",
    "Each",
    "Question",
    "answer",
    "decision",
    "ends",
    "gap_closed",
    "lab",
    "one_by_one",
    "ratio",
]
