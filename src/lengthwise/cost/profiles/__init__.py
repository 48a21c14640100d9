"""Profiles of operators: our file format, and readers of other people's measurements."""

from lengthwise.cost.profiles._aiconfigurator import import_aiconfigurator
from lengthwise.cost.profiles._llmservingsim import import_llmservingsim
from lengthwise.cost.profiles._parquet import read_profile, write_profile
from lengthwise.cost.profiles._vidur import import_vidur

__all__ = ["import_aiconfigurator", "import_llmservingsim", "import_vidur", "read_profile", "write_profile"]
