from .ledgers import LEDGER_CHECKS, check_ledger
from .policies import POLICY_CHECKS, check_policy
from .predictors import PREDICTOR_CHECKS, check_predictor, toy_samples

__all__ = [
    "LEDGER_CHECKS",
    "POLICY_CHECKS",
    "PREDICTOR_CHECKS",
    "check_ledger",
    "check_policy",
    "check_predictor",
    "toy_samples",
]
