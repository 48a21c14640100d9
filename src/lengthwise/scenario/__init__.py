"""Text to nouns: scenario files in TOML or YAML, ``--set``, and what they build."""

from lengthwise.scenario._bins import RULE_DOCS as BINNING_RULES
from lengthwise.scenario._load import load, loads
from lengthwise.scenario.capacities import Sustained, capacities
from lengthwise.scenario.explanation import Explanation, Fit, Step, explain
from lengthwise.scenario.labs import lab
from lengthwise.scenario.launches import write_launches
from lengthwise.scenario.outcomes import Outcome, run, slo_of
from lengthwise.scenario.requests import asked_of_server, requests
from lengthwise.scenario.scenario import Scenario
from lengthwise.scenario.searches import Asked, plan, questions, settled
from lengthwise.scenario.variants import Variant, build, deployment, scheduler

__all__ = [
    "BINNING_RULES",
    "Asked",
    "Explanation",
    "Fit",
    "Outcome",
    "Scenario",
    "Step",
    "Sustained",
    "Variant",
    "asked_of_server",
    "build",
    "capacities",
    "deployment",
    "explain",
    "lab",
    "load",
    "loads",
    "plan",
    "questions",
    "requests",
    "run",
    "scheduler",
    "settled",
    "slo_of",
    "write_launches",
]
