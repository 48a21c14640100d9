"""What formulas answer without an engine: Multi-Bin Batching, and queues with different knowledge of the lengths."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
