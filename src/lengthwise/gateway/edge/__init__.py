"""The clients' side of the gateway: an ASGI app with authentication and limits, in front of the relay."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
