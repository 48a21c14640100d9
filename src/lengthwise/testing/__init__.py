"""Kits for authors of plug-ins: what a part of one's own must keep to work with all the rest.

Nothing of lengthwise itself imports this room.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
