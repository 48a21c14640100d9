from .forecaster import Forecaster, Oracle, requested_tokens
from .prediction import Belief
from .predictor_process import ProcessLimits

__all__ = ["Belief", "Forecaster", "Oracle", "ProcessLimits", "requested_tokens"]
