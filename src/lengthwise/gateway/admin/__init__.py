"""The admin port of a gateway: a live page, its data, and metrics."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
