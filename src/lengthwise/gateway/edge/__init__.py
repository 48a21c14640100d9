"""The clients' side: an ASGI app that lets in what is allowed, within limits, and hands it on."""

from __future__ import annotations

from lengthwise.schema.errors import MissingExtraError

try:
    import msgspec as _msgspec  # noqa: F401
except ImportError as error:
    raise MissingExtraError("lengthwise serve", "gateway") from error

from lengthwise.gateway.edge.app import App
from lengthwise.gateway.edge.asked import Answer, Asked, Exchange
from lengthwise.gateway.edge.faults import Fault
from lengthwise.gateway.edge.keys import Tenants
from lengthwise.gateway.edge.server import check_certificate, renew_certificate, server

__all__ = [
    "Answer",
    "App",
    "Asked",
    "Exchange",
    "Fault",
    "Tenants",
    "check_certificate",
    "renew_certificate",
    "server",
]
