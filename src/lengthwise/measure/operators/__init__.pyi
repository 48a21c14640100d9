from .campaign import OperatorLine as OperatorLine
from .device import device_kind as device_kind
from .measure import Measurement as Measurement
from .measure import MeasurementSettings as MeasurementSettings
from .measure import measure_operators as measure_operators
from .measure import require_measurable as require_measurable
