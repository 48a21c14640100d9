"""Text to nouns: scenario files in TOML or YAML, ``--set``, and what they build."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
