from .fit import ESTIMATORS as ESTIMATORS
from .fit import fit_profile as fit_profile
from .fit import profile_tables as profile_tables
from .points import Target as Target
