"""Profiles of operators: our file format, readers of other people's measurements, and what is in a profile."""

from lengthwise.cost.profiles._aiconfigurator import import_aiconfigurator
from lengthwise.cost.profiles._gaps import Gap
from lengthwise.cost.profiles._llmservingsim import import_llmservingsim
from lengthwise.cost.profiles._parquet import read_profile, write_profile
from lengthwise.cost.profiles._vidur import import_vidur
from lengthwise.cost.profiles.check import Moved, ProfileCheck, check_profiles
from lengthwise.cost.profiles.describe import OperatorView, ProfileView, Share, describe_profile

__all__ = [
    "Gap",
    "Moved",
    "OperatorView",
    "ProfileCheck",
    "ProfileView",
    "Share",
    "check_profiles",
    "describe_profile",
    "import_aiconfigurator",
    "import_llmservingsim",
    "import_vidur",
    "read_profile",
    "write_profile",
]
