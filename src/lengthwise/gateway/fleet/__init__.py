"""The gateway's workers: discovery of engines, probing, health, and which of them may get requests."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
