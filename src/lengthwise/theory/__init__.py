"""What can be said without an engine: Multi-Bin Batching's formulas, and queues by what is known of lengths."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
