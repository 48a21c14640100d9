"""What the gateway keeps open to one engine: lines for requests, and aiohttp for all else."""

from __future__ import annotations

import ssl
from typing import Any

from lengthwise.gateway.config import Care, Engine
from lengthwise.schema.errors import InputError, MissingExtraError

_CHUNK_BYTES = 1 << 16


def open_session(engine: Engine, care: Care) -> Any:
    """An aiohttp session for one engine: its own connections, key and certificates; to be closed.

    Its connector holds the lines on which requests go (``lines_of``).

    Raises:
        MissingExtraError: aiohttp is not there.
        InputError: A certificate cannot be read.
    """
    try:
        import aiohttp

        from lengthwise.gateway.relay._connector import Connector
        from lengthwise.gateway.relay._lines import IDLE_S, Lines
    except ImportError as error:
        raise MissingExtraError("lengthwise serve", "gateway") from error
    tls = tls_context(engine)
    headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
    if engine.api_key:
        headers["Authorization"] = f"Bearer {engine.api_key}"
    return aiohttp.ClientSession(
        connector=Connector(Lines(engine, care, tls), limit=0, keepalive_timeout=IDLE_S, ssl=tls or True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=care.connect_s),
        headers=headers,
        auto_decompress=False,
        read_bufsize=_CHUNK_BYTES,
    )


def tls_context(engine: Engine) -> ssl.SSLContext | None:
    """How the engine's certificate is checked and ours is shown; None: as everybody's."""
    tls = engine.tls
    if tls is None:
        return None
    try:
        context = ssl.create_default_context(cafile=tls.ca)
        if tls.cert:
            context.load_cert_chain(tls.cert, tls.key)
    except (OSError, ssl.SSLError) as error:
        raise InputError(f"the certificates of engine {engine.shown} must be readable: {error}") from error
    return context
