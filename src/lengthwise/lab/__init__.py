"""What length-aware scheduling is worth at a load: policies, predictors, loads and batch sizes in one table."""

from lengthwise.lab.grid import lab
from lengthwise.lab.pairs import gap_closed, ratio
from lengthwise.lab.question import Bench, Contestant, Each, Question, ends, one_by_one
from lengthwise.lab.verdict import answer, verdict

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
