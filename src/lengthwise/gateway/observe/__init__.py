"""Looks back at traffic that passed: what length-aware order would have gained on it."""

from lengthwise.gateway.observe.finding import Change, Gain, OrderGain, OrderTimes, as_json
from lengthwise.gateway.observe.gain import gain
from lengthwise.gateway.observe.record import Record
from lengthwise.gateway.observe.report import report, text_report
from lengthwise.gateway.observe.service import Service, fit
from lengthwise.gateway.observe.trace import Trace, of_journal, of_rows
from lengthwise.gateway.observe.watch import Watch

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
