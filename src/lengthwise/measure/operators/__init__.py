"""Measures a model's operators on this machine's device with torch: adaptive points within a budget."""

from lengthwise.measure.operators.device import device_kind
from lengthwise.measure.operators.measure import (
    Measurement,
    measure_operators,
    measure_profile,
    require_measurable,
)
from lengthwise.measure.operators.result import OperatorLine

__all__ = [
    "Measurement",
    "OperatorLine",
    "device_kind",
    "measure_operators",
    "measure_profile",
    "require_measurable",
]
