"""The gateway's scheduler: it orders requests and assigns them to workers, without network, clock or tasks."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
