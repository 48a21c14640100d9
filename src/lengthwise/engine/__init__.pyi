from .deployment_builder import COST_SOURCES, deploy, disaggregate, handover_over
from .outcome import gap_edges
from .simulation import ready, simulate, warm_up

__all__ = ["COST_SOURCES", "deploy", "disaggregate", "gap_edges", "handover_over", "ready", "simulate", "warm_up"]
