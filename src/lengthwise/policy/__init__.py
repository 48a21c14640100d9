"""Scheduling policies: order of requests, victims, forming of steps, choice of a replica; small compiled functions."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
