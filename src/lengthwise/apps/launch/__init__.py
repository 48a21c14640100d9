"""Engines of a run: processes on this machine, Ray actors, engines at given addresses, or simulated engines."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
