"""Who goes first, who leaves, how a step is formed, which replica: small compiled functions."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
