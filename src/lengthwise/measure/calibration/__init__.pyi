from .calibration import calibrate
from .iteration_log import Iterations, read_iterations
from .measured_runs import client_was_disturbed
from .result import Calibration, Change, Load, Parameter, Score

__all__ = [
    "Calibration",
    "Change",
    "Iterations",
    "Load",
    "Parameter",
    "Score",
    "calibrate",
    "client_was_disturbed",
    "read_iterations",
]
