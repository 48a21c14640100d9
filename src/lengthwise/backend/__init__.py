"""Real engines: launch commands and files for simulated deployments, processes, and a client of servers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
