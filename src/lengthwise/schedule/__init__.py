"""Schedules with the highest throughput under a latency bound (ExeGPT): RRA and WAA, their estimates and plans."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
