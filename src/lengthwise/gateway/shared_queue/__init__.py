"""One queue over several gateways: a leader schedules the requests of all, and PostgreSQL carries the messages."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
