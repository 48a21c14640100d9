from .gain_monitor import Monitor, Record
from .ordering_gain import Change, Gain, OrderGain, OrderTimes, as_json, gain, report, text_report
from .replay import Service, fit
from .trace import Trace, of_journal, of_rows

__all__ = [
    "Change",
    "Gain",
    "Monitor",
    "OrderGain",
    "OrderTimes",
    "Record",
    "Service",
    "Trace",
    "as_json",
    "fit",
    "gain",
    "of_journal",
    "of_rows",
    "report",
    "text_report",
]
