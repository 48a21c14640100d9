from .postgres import SharedQueue as SharedQueue
from .scheduler import SharedScheduler as SharedScheduler
