"""From measured runs of a real engine to cost tables that agree with them."""

from lengthwise.measure.calibrate.answer import Calibration, Change, Load, Parameter, Score
from lengthwise.measure.calibrate.calibration import calibrate
from lengthwise.measure.calibrate.iterations import Iterations, read_iterations

__all__ = [
    "Calibration",
    "Change",
    "Iterations",
    "Load",
    "Parameter",
    "Score",
    "calibrate",
    "read_iterations",
]
