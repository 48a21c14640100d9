"""Measures real hardware and engines, and calibrates the cost model from what it measured."""

from lengthwise.measure.calibrate import calibrate
from lengthwise.measure.foreign import read_foreign
from lengthwise.measure.load import INTERRUPTED, bench
from lengthwise.measure.records_file import read_records, write_records

__all__ = ["INTERRUPTED", "bench", "calibrate", "read_foreign", "read_records", "write_records"]
