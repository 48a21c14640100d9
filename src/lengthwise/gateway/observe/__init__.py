"""Observation of gateway traffic: the gain that length-aware ordering would have brought."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
