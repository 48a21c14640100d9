from .queue import Queue
from .scheduler import Scheduler, check_change

__all__ = ["Queue", "Scheduler", "check_change"]
