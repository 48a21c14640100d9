from .events import EventLog, Tracing, json_lines
from .journal import Journal, Row, as_dict, from_dict, read, read_all
from .metrics import Metrics, Pair, Regret
from .telemetry import RequestTrace, RequestTraces, Telemetry

__all__ = [
    "EventLog", "Journal", "Metrics", "Pair", "Regret", "RequestTrace", "RequestTraces", "Row", "Telemetry",
    "Tracing", "as_dict", "from_dict", "json_lines", "read", "read_all",
]  # fmt: skip
