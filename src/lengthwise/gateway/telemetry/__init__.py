"""What a gateway tells of its requests: metrics, log lines, a journal, traces, and what its order gains."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
