from .experiment import Bench, Contestant, Each, Question, ends, lab, one_by_one
from .verdicts import answer, gap_closed, ratio, verdict

__all__ = [
    "Bench",
    "Contestant",
    "Each",
    "Question",
    "answer",
    "ends",
    "gap_closed",
    "lab",
    "one_by_one",
    "ratio",
    "verdict",
]
