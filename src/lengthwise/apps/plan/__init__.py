"""Planning: which models run when, on how many GPUs each, to minimize the makespan of an application."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
