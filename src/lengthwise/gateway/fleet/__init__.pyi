from .fleet import Fleet as Fleet
from .worker import Worker as Worker
