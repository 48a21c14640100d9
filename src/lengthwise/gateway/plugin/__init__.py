"""Schedulers for vLLM: ``--scheduler-cls lengthwise.gateway.plugin.LengthScheduler`` or ``...RraScheduler``."""

from lengthwise.gateway.plugin.length_scheduler import LengthScheduler
from lengthwise.gateway.plugin.rra_scheduler import EngineState, Phase, PhaseTracker, RraScheduler
from lengthwise.gateway.plugin.settings import Hint, RraSettings, Settings, hint_of

__all__ = [
    "EngineState", "Hint", "LengthScheduler", "Phase", "PhaseTracker", "RraScheduler", "RraSettings", "Settings",
    "hint_of",
]  # fmt: skip
