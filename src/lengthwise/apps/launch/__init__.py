"""How engines come to be there: processes of this machine, Ray actors, given addresses, or simulated ones."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
