"""The engines: who is there, what each can do, how it fares, and whether it may be given requests."""

from __future__ import annotations

from lengthwise.gateway.fleet.fleet import Fleet
from lengthwise.gateway.fleet.worker import Worker

__all__ = ["Fleet", "Worker"]
