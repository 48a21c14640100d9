"""From a prompt, and the tokens so far, to a distribution of the output length."""

from lengthwise.predict.attach import attach, statistic_of
from lengthwise.predict.buckets import BucketEcdf
from lengthwise.predict.classes import BinNeighbour, Confusion, Quantised
from lengthwise.predict.conditional import Conditional
from lengthwise.predict.conformal import Conformal
from lengthwise.predict.constant import Constant
from lengthwise.predict.contract import Predictor, Prompts, Samples
from lengthwise.predict.distribution import LEVELS, LengthDistribution
from lengthwise.predict.ecdf import Ecdf
from lengthwise.predict.ensemble import Ensemble
from lengthwise.predict.errors import LogNormalError, Reversed, Same
from lengthwise.predict.guard import Guarded
from lengthwise.predict.oracle import Oracle, Truthful
from lengthwise.predict.save import load, save

__all__ = [
    "LEVELS",
    "BinNeighbour",
    "BucketEcdf",
    "Conditional",
    "Conformal",
    "Confusion",
    "Constant",
    "Ecdf",
    "Ensemble",
    "Guarded",
    "LengthDistribution",
    "LogNormalError",
    "Oracle",
    "Predictor",
    "Prompts",
    "Quantised",
    "Reversed",
    "Same",
    "Samples",
    "Truthful",
    "attach",
    "load",
    "save",
    "statistic_of",
]
