from .engine_request import obstacle
from .relay import Relay
from .request_session import Answer
from .upstream import open_session

__all__ = ["Answer", "Relay", "obstacle", "open_session"]
