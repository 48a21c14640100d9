"""Time passes: a workload on a deployment becomes records."""

from lengthwise.engine._outcome import gap_edges
from lengthwise.engine.deploy import COST_SOURCES, deploy
from lengthwise.engine.sides import disaggregate, handover_over
from lengthwise.engine.simulate import ready, simulate, warm_up

__all__ = [
    "COST_SOURCES",
    "deploy",
    "disaggregate",
    "gap_edges",
    "handover_over",
    "ready",
    "simulate",
    "warm_up",
]
