"""Models, GPUs, nodes and links by name, from data files or from files of the user."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
