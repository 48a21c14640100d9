"""What a gateway tells of its requests: metrics, log lines, a journal, traces, and what its order gains."""

from lengthwise.gateway.telemetry.journal import Journal, read, read_all
from lengthwise.gateway.telemetry.logs import EventLog, json_lines
from lengthwise.gateway.telemetry.metrics import Metrics
from lengthwise.gateway.telemetry.regret import Pair, Regret
from lengthwise.gateway.telemetry.row import Row, as_dict, from_dict
from lengthwise.gateway.telemetry.telemetry import Telemetry
from lengthwise.gateway.telemetry.tracing import Tracing
from lengthwise.gateway.telemetry.trips import Trip, Trips

__all__ = [
    "EventLog",
    "Journal",
    "Metrics",
    "Pair",
    "Regret",
    "Row",
    "Telemetry",
    "Tracing",
    "Trip",
    "Trips",
    "as_dict",
    "from_dict",
    "json_lines",
    "read",
    "read_all",
]
