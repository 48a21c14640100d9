from .deployment_builder import COST_SOURCES, deploy, disaggregate, kv_transfer_over
from .outcome import gap_edges
from .simulation import on_compile, ready, simulate, warm_up

__all__ = [
    "COST_SOURCES",
    "deploy",
    "disaggregate",
    "gap_edges",
    "kv_transfer_over",
    "on_compile",
    "ready",
    "simulate",
    "warm_up",
]
