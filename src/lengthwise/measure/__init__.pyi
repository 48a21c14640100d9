from .calibration import calibrate
from .external_results import read_foreign
from .load import INTERRUPTED, LoadSettings, bench
from .records_file import read_records, write_records

__all__ = ["INTERRUPTED", "LoadSettings", "bench", "calibrate", "read_foreign", "read_records", "write_records"]
