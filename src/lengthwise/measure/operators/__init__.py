"""Measures a model's operators on this machine's device with torch, at adaptively chosen points within a budget."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
