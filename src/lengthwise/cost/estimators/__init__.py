"""From measured points to cost tables: several estimators, judged by points they have not seen."""

from lengthwise.cost.estimators.fit import ESTIMATORS, fit_profile
from lengthwise.cost.estimators.source import profile_tables

__all__ = ["ESTIMATORS", "fit_profile", "profile_tables"]
