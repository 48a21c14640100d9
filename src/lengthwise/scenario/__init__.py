"""Text to nouns: scenario files in TOML or YAML, ``--set``, and what they build."""

from lengthwise.scenario._load import load, loads
from lengthwise.scenario.build import Variant, build, deployment, scheduler
from lengthwise.scenario.scenario import Scenario

__all__ = ["Scenario", "Variant", "build", "deployment", "load", "loads", "scheduler"]
