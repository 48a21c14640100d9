"""The best schedule under a latency bound: RRA, WAA, what they take and what they yield."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
