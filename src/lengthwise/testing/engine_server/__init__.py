"""An emulated OpenAI-compatible engine: real time, real batching, real faults, toy text.

For gateways and clients to be tested against. ``python -m lengthwise.testing.engine_server --help`` runs it as
a process of its own.
"""

from lengthwise.testing.engine_server.batch import Limits
from lengthwise.testing.engine_server.faults import LAST, Fault, FaultPlan
from lengthwise.testing.engine_server.log import Entry, Log
from lengthwise.testing.engine_server.server import EngineServer
from lengthwise.testing.engine_server.spec import EngineSpec, LinearSteps, emulated
from lengthwise.testing.engine_server.threaded import in_thread
from lengthwise.testing.engine_server.toy_model import decode, encode

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
