"""Turns text into checked settings: scenario, application and gateway files (TOML or YAML), and ``--set``."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
