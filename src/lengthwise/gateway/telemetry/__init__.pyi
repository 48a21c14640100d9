from .events import EventLog, Tracing, json_lines
from .journal import Journal, Row, as_dict, from_dict, read, read_all
from .metrics import Metrics, Pair, Regret
from .telemetry import Telemetry, Trip, Trips

__all__ = ["EventLog", "Journal", "Metrics", "Pair", "Regret", "Row", "Telemetry", "Tracing", "Trip", "Trips", "as_dict", "from_dict", "json_lines", "read", "read_all"]
