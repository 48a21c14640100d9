"""What a step costs and what fits in memory: every source of timing is converted to the same cost tables."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
