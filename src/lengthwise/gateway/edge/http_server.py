"""A uvicorn server that keeps the limits which an ASGI app cannot: heads, connections, slow requests."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from lengthwise.gateway.config import Limits, Tls
from lengthwise.schema.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    import uvicorn

    from lengthwise.gateway.edge.app import App

_REST_S = 10.0


class Seldom(logging.Filter):
    """Lets the same words through at most every 10 s: who sends garbage must not fill the log."""

    def __init__(self) -> None:
        super().__init__()
        self._told_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged."""
        if record.levelno != logging.WARNING:
            return True
        if record.created - self._told_s.get(str(record.msg), float("-inf")) < _REST_S:
            return False
        if len(self._told_s) > 64:
            self._told_s.clear()
        self._told_s[str(record.msg)] = record.created
        return True


_SELDOM = Seldom()


def server(
    app: App | Any,
    limits: Limits,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tls: Tls | None = None,
    drain_s: float | None = None,
    proxies: str | None = None,
) -> uvicorn.Server:
    """A server for an app, not started: ``await server.serve(sockets)`` runs it until ``should_exit``.

    With a ``ca`` in ``tls`` clients must show a certificate of it.

    Args:
        app: What it serves.
        limits: Of heads and connections; a request must have come within ``body_s``,
            and a connection without one is closed after ``idle_s``.
        host: Address it listens at.
        port: 0 picks a free one.
        tls: Its certificate.
        drain_s: How long requests under way may take once it is to end.
        proxies: Addresses, divided by commas, of proxies whose X-Forwarded-For is believed.
    """
    try:
        import uvicorn

        from lengthwise.gateway.edge.http_protocol import Wire
    except ImportError as error:
        raise MissingExtraError("lengthwise serve", "gateway") from error
    logging.getLogger("uvicorn.error").addFilter(_SELDOM)  # once, however often it is added
    settings: dict[str, Any] = {
        "host": host,
        "port": port,
        "http": type("LimitedWire", (Wire,), {"limits": limits, **_hearing(app)}),
        "loop": "auto",
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "proxy_headers": proxies is not None,
        "forwarded_allow_ips": proxies,
        "timeout_keep_alive": limits.idle_s,
        "timeout_graceful_shutdown": None if drain_s is None else max(1, round(drain_s)),
        **(_secured(tls) if tls else {}),
    }
    return uvicorn.Server(uvicorn.Config(app, **settings))


def _hearing(app: App | Any) -> dict[str, Any]:
    """The app as who hears of refusals before it was asked, where it listens."""
    heard = getattr(app, "refused", None)
    return {} if heard is None else {"refused": staticmethod(heard)}


def _secured(tls: Tls) -> dict[str, Any]:
    import ssl

    required = ssl.CERT_REQUIRED if tls.ca else ssl.CERT_NONE
    return {"ssl_certfile": tls.cert, "ssl_keyfile": tls.key, "ssl_ca_certs": tls.ca, "ssl_cert_reqs": int(required)}


def check_certificate(tls: Tls) -> None:
    """That the files are there and fit each other; raises InputError."""
    import ssl

    if tls.cert is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(tls.cert, tls.key)
    except (OSError, ssl.SSLError) as error:
        raise InputError(
            f"[listen] tls: the certificate {tls.cert} and its key {tls.key} cannot be used: {error}"
        ) from error


def renew_certificate(of: uvicorn.Server, tls: Tls) -> None:
    """Reads a running server's certificate and key again, for connections from now on; others stay as they are."""
    context = of.config.ssl
    if context is not None and tls.cert is not None:
        context.load_cert_chain(tls.cert, tls.key)
