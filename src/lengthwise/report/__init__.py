"""Results as terminal tables, self-contained HTML pages, timelines and JSON files."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
