from .length_predictor import LengthPredictor as LengthPredictor
from .length_predictor import Oracle as Oracle
from .length_predictor import requested_tokens as requested_tokens
from .prediction import CorrectedPrediction as CorrectedPrediction
from .predictor_process import ProcessLimits as ProcessLimits
