"""The admin port of a gateway: a page that shows it live, its data, and its metrics."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
