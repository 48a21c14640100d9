"""The clients' side: an ASGI app with authentication and limits, in front of the relay."""

from __future__ import annotations

from lengthwise.gateway.edge.app import App
from lengthwise.gateway.edge.auth import Tenants
from lengthwise.gateway.edge.errors import Fault
from lengthwise.gateway.edge.http_server import check_certificate, renew_certificate, server
from lengthwise.gateway.protocols import Answer, Exchange
from lengthwise.gateway.request import ClientRequest
from lengthwise.schema.errors import MissingExtraError

try:
    import msgspec as _msgspec  # noqa: F401
except ImportError as error:
    raise MissingExtraError("lengthwise serve", "gateway") from error


__all__ = [
    "Answer",
    "App",
    "ClientRequest",
    "Exchange",
    "Fault",
    "Tenants",
    "check_certificate",
    "renew_certificate",
    "server",
]
