from .length_predictor import LengthPredictor as LengthPredictor
from .length_predictor import Oracle as Oracle
from .length_predictor import fixed_tokens as fixed_tokens
from .prediction import CorrectedPrediction as CorrectedPrediction
from .predictor_process import ProcessLimits as ProcessLimits
