from .app import AdminApp
from .state import State

__all__ = ["AdminApp", "State"]
