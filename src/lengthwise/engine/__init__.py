"""Time passes: a workload on a deployment becomes records."""

from lengthwise.engine._outcome import gap_edges
from lengthwise.engine.deploy import COST_SOURCES, deploy
from lengthwise.engine.simulate import ready, simulate, warm_up

__all__ = ["COST_SOURCES", "deploy", "gap_edges", "ready", "simulate", "warm_up"]
