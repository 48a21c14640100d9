"""One client's request over its life: sent to an engine, preempted, resumed, failed over, and its answer."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
