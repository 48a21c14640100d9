from .fit import ESTIMATORS, fit_profile, profile_tables
from .points import Target

__all__ = ["ESTIMATORS", "Target", "fit_profile", "profile_tables"]
