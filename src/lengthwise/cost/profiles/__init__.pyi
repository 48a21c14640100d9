from .aiconfigurator import import_aiconfigurator
from .check import Moved, ProfileCheck, check_profiles
from .describe import Gap, OperatorView, ProfileView, Share, describe_profile
from .llmservingsim import import_llmservingsim
from .profile_file import read_profile, write_profile
from .vidur import import_vidur

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
