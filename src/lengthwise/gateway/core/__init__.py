"""Who goes first, and where: the gateway's scheduler, without network, clock or tasks."""

from lengthwise.gateway.core.changing import check_change
from lengthwise.gateway.core.queue import Queue
from lengthwise.gateway.core.scheduler import Scheduler

__all__ = ["Queue", "Scheduler", "check_change"]
