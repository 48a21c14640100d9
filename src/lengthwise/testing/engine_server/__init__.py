"""An emulated OpenAI-compatible engine: real time, real batching, real faults, toy text.

For gateways and clients to be tested against. ``python -m lengthwise.testing.engine_server --help`` runs it as
a process of its own.
"""

from lengthwise.testing.engine_server.completions import decode, encode
from lengthwise.testing.engine_server.engine import EngineSpec, Limits, LinearSteps, emulated
from lengthwise.testing.engine_server.request_handler import LAST, Entry, Fault, FaultPlan, Log
from lengthwise.testing.engine_server.server import EngineServer, in_thread

__all__ = [
    "LAST",
    "EngineServer",
    "EngineSpec",
    "Entry",
    "Fault",
    "FaultPlan",
    "Limits",
    "LinearSteps",
    "Log",
    "decode",
    "emulated",
    "encode",
    "in_thread",
]
