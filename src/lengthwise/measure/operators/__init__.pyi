from .campaign import OperatorLine
from .device import device_kind
from .measure import Measurement, measure_operators, measure_profile, require_measurable

__all__ = ["Measurement", "OperatorLine", "device_kind", "measure_operators", "measure_profile", "require_measurable"]
