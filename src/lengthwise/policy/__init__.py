"""Scheduling policies as small compiled functions: order of requests, victims, forming of steps, choice of replica."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
