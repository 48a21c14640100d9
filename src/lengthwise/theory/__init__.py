"""Closed forms and small simulations: Multi-Bin Batching, M/G/1 queues under several orders of service, LRU caches."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
