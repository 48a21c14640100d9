"""From a prompt, and the tokens so far, to a distribution of the output length."""

from lengthwise.predict.contract import Predictor, Prompts, Samples
from lengthwise.predict.distribution import LEVELS, LengthDistribution

__all__ = ["LEVELS", "LengthDistribution", "Predictor", "Prompts", "Samples"]
