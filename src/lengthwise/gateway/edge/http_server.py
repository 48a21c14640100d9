"""A uvicorn server with limits that an ASGI app cannot enforce: header size, connections, slow requests."""

from __future__ import annotations

import logging
import ssl
from typing import Any

import uvicorn

from lengthwise.gateway.config import Limits, Tls
from lengthwise.gateway.edge.http_protocol import HttpProtocol
from lengthwise.schema.errors import InputError

_INTERVAL_S = 10.0


class RateLimitedWarnings(logging.Filter):
    """Pass each warning at most every 10 s, so that clients that send garbage cannot fill the log."""

    def __init__(self) -> None:
        super().__init__()
        self._logged_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is logged."""
        message = str(record.msg)
        if record.levelno == logging.WARNING:
            if record.created - self._logged_s.get(message, float("-inf")) < _INTERVAL_S:
                return False
            if len(self._logged_s) > 64:
                self._logged_s.clear()
            self._logged_s[message] = record.created
        return True


_RATE_LIMITED = RateLimitedWarnings()


def server(
    app: Any,
    limits: Limits,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tls: Tls | None = None,
    drain_s: float | None = None,
    proxies: str | None = None,
) -> uvicorn.Server:
    """Return a server for an app, of which ``refused`` gets every Fault: ``await server.serve(sockets)`` runs it.

    ``port`` 0 picks a free one; with a ``tls.ca`` clients must present a certificate. ``drain_s`` bounds requests in
    progress during shutdown; the X-Forwarded-For of ``proxies`` is trusted.
    """
    logging.getLogger("uvicorn.error").addFilter(_RATE_LIMITED)  # adds it once, however often this runs
    members: dict[str, Any] = {"limits": limits}
    if (refused := getattr(app, "refused", None)) is not None:
        members["refused"] = staticmethod(refused)
    settings: dict[str, Any] = {"loop": "auto", "ws": "none", "lifespan": "off", "log_config": None}
    settings |= {"access_log": False, "server_header": False}
    settings |= {"host": host, "port": port, "http": type("LimitedHttpProtocol", (HttpProtocol,), members)}
    settings |= {"proxy_headers": proxies is not None, "forwarded_allow_ips": proxies}
    settings["timeout_keep_alive"] = limits.idle_s
    settings["timeout_graceful_shutdown"] = None if drain_s is None else max(1, round(drain_s))
    if tls:
        required = int(ssl.CERT_REQUIRED if tls.ca else ssl.CERT_NONE)
        settings |= {"ssl_certfile": tls.cert, "ssl_keyfile": tls.key}
        settings |= {"ssl_ca_certs": tls.ca, "ssl_cert_reqs": required}
    return uvicorn.Server(uvicorn.Config(app, **settings))


def check_certificate(tls: Tls) -> None:
    """Raise InputError if the certificate and its key cannot be loaded together."""
    try:
        if tls.cert is not None:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(tls.cert, tls.key)
    except (OSError, ssl.SSLError) as error:
        message = f"[listen] tls: the certificate {tls.cert} and its key {tls.key} cannot be used: {error}"
        raise InputError(message) from error


def renew_certificate(server: uvicorn.Server, tls: Tls) -> None:
    """Reload the certificate and key of a running server, for new connections."""
    context = server.config.ssl
    if context is not None and tls.cert is not None:
        context.load_cert_chain(tls.cert, tls.key)
