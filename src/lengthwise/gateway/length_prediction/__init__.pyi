from .forecaster import Forecaster, Oracle, told_tokens
from .prediction import Belief
from .predictor_process import Care

__all__ = ["Belief", "Care", "Forecaster", "Oracle", "told_tokens"]
