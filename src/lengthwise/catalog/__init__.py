"""Models, GPUs, nodes and links by name, from the catalog's data files or a user's own files."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
