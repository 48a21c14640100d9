"""Profiles of operators: our file format, readers of other people's measurements, and what is in a profile."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
