"""Value of length-aware scheduling: policies, predictors, loads and batch sizes in one table, with verdicts."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
