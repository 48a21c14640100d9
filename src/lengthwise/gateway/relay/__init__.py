"""Relay client requests to engines: attempts, preemption, resumption, failover, and answers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
