from .queue import Queue as Queue
from .scheduler import Scheduler as Scheduler
from .scheduler import check_change as check_change
