from .fleet import Fleet as Fleet
from .worker import EngineWorker as EngineWorker
