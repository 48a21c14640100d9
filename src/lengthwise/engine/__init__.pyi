from .deployment_builder import COST_SOURCES, deploy, disaggregate, kv_transfer_over
from .outcome import gap_edges
from .simulation import ready, simulate, warm_up

__all__ = ["COST_SOURCES", "deploy", "disaggregate", "gap_edges", "kv_transfer_over", "ready", "simulate", "warm_up"]
