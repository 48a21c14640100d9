"""The engines: who is there, what each can do, how it fares, and whether it may be given requests."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
