from .calibration import calibrate
from .iteration_log import Iterations, read_iterations
from .result import Calibration, Change, Load, Parameter, Score

__all__ = ["Calibration", "Change", "Iterations", "Load", "Parameter", "Score", "calibrate", "read_iterations"]
