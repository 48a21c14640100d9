"""Searches for the deployment that meets the SLOs and is best for an objective, for example the cheapest."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
