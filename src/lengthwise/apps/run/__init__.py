"""Applications run: tasks leased, asked and recorded; the plan followed; every answer kept."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
