"""Text to nouns: scenario files in TOML or YAML, ``--set``, and what they build."""

from lengthwise.scenario._load import load, loads
from lengthwise.scenario.scenario import Scenario

__all__ = ["Scenario", "load", "loads"]
