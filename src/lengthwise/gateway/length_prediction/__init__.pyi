from .length_predictor import LengthPredictor, Oracle, requested_tokens
from .prediction import CorrectedPrediction
from .predictor_process import ProcessLimits

__all__ = ["CorrectedPrediction", "LengthPredictor", "Oracle", "ProcessLimits", "requested_tokens"]
