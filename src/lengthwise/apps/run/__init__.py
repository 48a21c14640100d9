"""Runs of applications, which lease tasks, send requests, record answers and follow a plan."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
