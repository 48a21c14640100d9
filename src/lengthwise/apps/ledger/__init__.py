"""Where tasks and their answers are kept: one contract, several stores."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
