from .attachment import attach, statistic_of
from .contract import Predictor, Prompts, Samples
from .distribution import LEVELS, LengthDistribution
from .empirical import BucketEcdf, Constant, Ecdf
from .encoder import Encoder
from .evaluation import Evaluation, ExplainableVariance, evaluate, explainable_variance
from .lexical import Lexical
from .oracle import BinNeighbour, Confusion, LogNormalError, Oracle, Quantised, Reversed, Same, Truthful
from .sample_files import read, read_prompts, split
from .serialization import default, load, opened, save
from .wrappers import Conditional, Conformal, Ensemble, Guarded

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
    "ExplainableVariance",
    "Guarded",
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
    "explainable_variance",
    "load",
    "opened",
    "read",
    "read_prompts",
    "save",
    "split",
    "statistic_of",
]
