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
from lengthwise.predict.encoder import Encoder
from lengthwise.predict.ensemble import Ensemble
from lengthwise.predict.errors import LogNormalError, Reversed, Same
from lengthwise.predict.evaluate import Evaluation, evaluate
from lengthwise.predict.guard import Guarded
from lengthwise.predict.knowable import Knowable, knowable
from lengthwise.predict.lexical import Lexical
from lengthwise.predict.oracle import Oracle, Truthful
from lengthwise.predict.read import read, read_prompts, split
from lengthwise.predict.save import load, save
from lengthwise.predict.shipped import default, opened

__all__ = [
    "LEVELS",
    "BinNeighbour",
    "BucketEcdf",
    "Conditional",
    "Conformal",
    "Confusion",
    "Constant",
    "Ecdf",
    "Encoder",
    "Ensemble",
    "Evaluation",
    "Guarded",
    "Knowable",
    "LengthDistribution",
    "Lexical",
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
    "default",
    "evaluate",
    "knowable",
    "load",
    "opened",
    "read",
    "read_prompts",
    "save",
    "split",
    "statistic_of",
]
