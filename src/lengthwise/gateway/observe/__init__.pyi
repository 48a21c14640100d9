from .ordering_gain import Change, Gain, OrderGain, OrderTimes, as_json, gain, report, text_report
from .replay import Service, fit
from .trace import Trace, of_journal, of_rows
from .watch import Record, Watch

__all__ = [
    "Change",
    "Gain",
    "OrderGain",
    "OrderTimes",
    "Record",
    "Service",
    "Trace",
    "Watch",
    "as_json",
    "fit",
    "gain",
    "of_journal",
    "of_rows",
    "report",
    "text_report",
]
