"""Profiles of operators: our file format, and readers of other people's measurements."""

from lengthwise.cost.profiles._parquet import read_profile, write_profile

__all__ = ["read_profile", "write_profile"]
