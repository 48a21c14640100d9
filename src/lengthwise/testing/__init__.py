"""Conformance kits for plug-in authors, and emulated servers for tests and for the demo."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
