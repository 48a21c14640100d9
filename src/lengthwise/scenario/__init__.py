"""Text to nouns: scenario files in TOML or YAML, ``--set``, and what they build."""

from lengthwise.scenario._load import load, loads
from lengthwise.scenario.explanation import Explanation, Fit, Step, explain
from lengthwise.scenario.outcomes import Outcome, run
from lengthwise.scenario.scenario import Scenario
from lengthwise.scenario.variants import Variant, build, deployment, scheduler

__all__ = [
    "Explanation",
    "Fit",
    "Outcome",
    "Scenario",
    "Step",
    "Variant",
    "build",
    "deployment",
    "explain",
    "load",
    "loads",
    "run",
    "scheduler",
]
