from .calibration import calibrate as calibrate
from .external_results import read_external_results as read_external_results
from .load import INTERRUPTED as INTERRUPTED
from .load import LoadSettings as LoadSettings
from .load import bench as bench
from .records_file import read_records as read_records
from .records_file import write_records as write_records
