"""What length-aware scheduling is worth at a load: policies, predictors, loads and batch sizes in one table."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
