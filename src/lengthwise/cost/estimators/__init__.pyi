from .fit import ESTIMATORS, fit_profile, profile_tables

__all__ = ["ESTIMATORS", "fit_profile", "profile_tables"]
