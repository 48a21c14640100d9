"""Kits for authors of plug-ins: what a part of one's own must keep to work with all the rest.

Nothing of lengthwise itself imports this room.
"""

from lengthwise.testing._toys import toy_samples
from lengthwise.testing.policies import POLICY_CHECKS, check_policy
from lengthwise.testing.predictors import PREDICTOR_CHECKS, check_predictor

__all__ = ["POLICY_CHECKS", "PREDICTOR_CHECKS", "check_policy", "check_predictor", "toy_samples"]
