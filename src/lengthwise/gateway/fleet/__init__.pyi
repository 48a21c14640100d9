from .fleet import Fleet
from .worker import Worker

__all__ = ["Fleet", "Worker"]
