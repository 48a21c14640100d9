"""Telemetry of gateway requests: metrics, log lines, a journal, traces and the gain over FCFS."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
