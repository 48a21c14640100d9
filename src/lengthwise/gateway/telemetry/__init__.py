"""Record the gateway's requests: metrics, log lines, a journal, traces, and timelines."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
