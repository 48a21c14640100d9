from .campaign import OperatorLine
from .device import device_kind
from .measure import Measurement, MeasurementSettings, measure_operators, require_measurable

__all__ = [
    "Measurement",
    "MeasurementSettings",
    "OperatorLine",
    "device_kind",
    "measure_operators",
    "require_measurable",
]
