"""Kits for authors of plug-ins: what a part of one's own must keep to work with all the rest.

Nothing of lengthwise itself imports this room.
"""

from lengthwise.testing._toys import toy_samples
from lengthwise.testing.ledgers import LEDGER_CHECKS, check_ledger
from lengthwise.testing.policies import POLICY_CHECKS, check_policy
from lengthwise.testing.predictors import PREDICTOR_CHECKS, check_predictor

__all__ = [
    "LEDGER_CHECKS",
    "POLICY_CHECKS",
    "PREDICTOR_CHECKS",
    "check_ledger",
    "check_policy",
    "check_predictor",
    "toy_samples",
]
