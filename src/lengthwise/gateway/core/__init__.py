"""The order of requests and their workers: the gateway's scheduler, without network, clock or tasks."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
