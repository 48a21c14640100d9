"""Results of other programs, in the records of a simulation."""

from lengthwise.measure.foreign.read import FORMATS, read_foreign

__all__ = ["FORMATS", "read_foreign"]
