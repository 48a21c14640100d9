"""Measures real hardware and engines, and calibrates the cost model from what it measured."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
