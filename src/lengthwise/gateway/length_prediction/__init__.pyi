from .forecaster import Forecaster, Oracle, requested_tokens
from .prediction import Belief
from .predictor_process import Care

__all__ = ["Belief", "Care", "Forecaster", "Oracle", "requested_tokens"]
