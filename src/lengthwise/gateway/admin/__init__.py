"""The admin port of a gateway: a page that shows it live, its data, and its metrics."""

from lengthwise.gateway.admin.app import AdminApp
from lengthwise.gateway.admin.state import State

__all__ = ["AdminApp", "State"]
