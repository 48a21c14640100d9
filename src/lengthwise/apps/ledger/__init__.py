"""Ledgers, which store the tasks of a run and their outputs: one interface over several databases."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
