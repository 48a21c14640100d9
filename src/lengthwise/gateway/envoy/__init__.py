"""The gateway as Envoy's endpoint picker: the external processing service, and a configuration of Envoy."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
