"""Text to nouns: scenario files in TOML or YAML, ``--set``, and what they build."""

from lengthwise.scenario._load import load, loads
from lengthwise.scenario.build import Variant, build, deployment, scheduler
from lengthwise.scenario.explain import Explanation, Fit, Step, explain
from lengthwise.scenario.run import Outcome, run
from lengthwise.scenario.scenario import Scenario

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
