"""Emulated OpenAI-compatible engine: real batching and faults, toy text. ``python -m`` runs it as a process."""

from lengthwise.engine.continuous_batching import Limits
from lengthwise.testing.engine_server.completions import decode, encode
from lengthwise.testing.engine_server.engine import EngineSpec, LinearSteps, emulated
from lengthwise.testing.engine_server.request_handler import LAST, Entry, Fault, FaultPlan, Log
from lengthwise.testing.engine_server.server import EngineServer, in_thread

__all__ = [
    "LAST", "EngineServer", "EngineSpec", "Entry", "Fault", "FaultPlan", "Limits", "LinearSteps", "Log", "decode",
    "emulated", "encode", "in_thread",
]  # fmt: skip
