"""Text to nouns: scenario files in TOML or YAML, ``--set``, and what they build."""

from lengthwise.scenario._bins import RULE_DOCS as BINNING_RULES
from lengthwise.scenario._load import load, loads
from lengthwise.scenario._values import seconds
from lengthwise.scenario.adapting import Live, adapter_of, replay
from lengthwise.scenario.capacities import Sustained, capacities
from lengthwise.scenario.explanation import Explanation, Fit, Step, explain
from lengthwise.scenario.following import (
    Adapted,
    Follow,
    PhaseFollower,
    follower_maker,
    follower_of,
    seated,
)
from lengthwise.scenario.gateways import GatewaySettings, gateway_reader, load_gateway, loads_gateway
from lengthwise.scenario.labs import lab
from lengthwise.scenario.launches import write_launches
from lengthwise.scenario.outcomes import Outcome, run, slo_of
from lengthwise.scenario.requests import asked_of_server, deployment_of_server, requests
from lengthwise.scenario.scenario import Scenario
from lengthwise.scenario.schedule_launches import ScheduleLaunch, require_served, write_schedule_launch
from lengthwise.scenario.schedule_outcomes import (
    ScheduleOutcome,
    SeenNumber,
    requests_to_count,
    schedule_outcome,
)
from lengthwise.scenario.schedule_plans import PlannedRun, phases_of, planned_run
from lengthwise.scenario.schedule_runs import ScheduleLoad, ScheduleRun, run_schedule, schedule_requests
from lengthwise.scenario.schedules import plan_schedule, task_of
from lengthwise.scenario.searches import Asked, plan, questions, settled
from lengthwise.scenario.variants import Variant, build, deployment, scheduler

__all__ = [
    "BINNING_RULES",
    "Adapted",
    "Asked",
    "Explanation",
    "Fit",
    "Follow",
    "GatewaySettings",
    "Live",
    "Outcome",
    "PhaseFollower",
    "PlannedRun",
    "Scenario",
    "ScheduleLaunch",
    "ScheduleLoad",
    "ScheduleOutcome",
    "ScheduleRun",
    "SeenNumber",
    "Step",
    "Sustained",
    "Variant",
    "adapter_of",
    "asked_of_server",
    "build",
    "capacities",
    "deployment",
    "deployment_of_server",
    "explain",
    "follower_maker",
    "follower_of",
    "gateway_reader",
    "lab",
    "load",
    "load_gateway",
    "loads",
    "loads_gateway",
    "phases_of",
    "plan",
    "plan_schedule",
    "planned_run",
    "questions",
    "replay",
    "requests",
    "requests_to_count",
    "require_served",
    "run",
    "run_schedule",
    "schedule_outcome",
    "schedule_requests",
    "scheduler",
    "seated",
    "seconds",
    "settled",
    "slo_of",
    "task_of",
    "write_launches",
    "write_schedule_launch",
]
