"""Planning: which models run when, and on how many GPUs, so that the makespan of an application is short."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
