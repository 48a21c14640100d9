"""What an iteration costs and what fits: every source of timing compiles to the same tables."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
