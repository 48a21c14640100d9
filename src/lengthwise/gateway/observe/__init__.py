"""Estimate what length-aware ordering would gain on the observed traffic."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
