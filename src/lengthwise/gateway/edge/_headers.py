"""Which headers are read, and what of them goes on."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterable

from lengthwise.gateway.config import Limits
from lengthwise.gateway.edge.faults import Fault

Raw = Iterable[tuple[bytes, bytes]]
_READ = frozenset({
    b"accept", b"authorization", b"content-encoding", b"content-length", b"content-type", b"traceparent",
    b"tracestate", b"x-request-id", b"x-request-timeout-s", b"x-session-id", b"x-stainless-read-timeout",
})  # fmt: skip
_NAME = re.compile(rb"[A-Za-z0-9._:/=+\-]{1,128}\Z")
_TRACE = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z")
_PRINTABLE = re.compile(rb"[\x20-\x7e]{1,512}\Z")
_PASSED = (
    (b"accept", "Accept", _PRINTABLE),
    (b"traceparent", "traceparent", _TRACE),
    (b"tracestate", "tracestate", _PRINTABLE),
    (b"x-session-id", "X-Session-Id", _NAME),
)
_SECONDS = re.compile(rb"[0-9]{1,9}(?:\.[0-9]{1,9})?\Z")
_JSON = re.compile(
    rb"application/(?:json|[a-z0-9.\-]+\+json)[ \t]*(?:;[ \t]*charset=\"?utf-?8\"?[ \t]*)?\Z", re.IGNORECASE
)
_START, _COUNT = secrets.token_hex(6), itertools.count(1)


def read(headers: list[tuple[bytes, bytes]], limits: Limits) -> dict[bytes, bytes]:
    """Those that the gateway knows, by name.

    Raises:
        Fault: 431, they are too many or too long; 400, one that may stand once stands twice.
    """
    if len(headers) > limits.headers:
        raise too_large(f"There may be {limits.headers} header fields; there are {len(headers)}.")
    if sum([len(name) + len(value) + 4 for name, value in headers]) > limits.header_bytes:
        raise too_large(f"The header fields may have {limits.header_bytes} bytes in all.")
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _READ:
            if name in found and name != b"accept":
                raise Fault(
                    400, "invalid", f"The header {name.decode()} must stand once.", code="duplicate_header"
                )
            found[name] = value
    return found


def request_id(headers: dict[bytes, bytes]) -> str:
    """What the client calls the request, where that is short and plain; else a new name."""
    given = headers.get(b"x-request-id")
    if given is not None and _NAME.match(given):
        return given.decode()
    return f"req-{_START}-{next(_COUNT)}"


def passed(headers: dict[bytes, bytes], name: str) -> list[tuple[str, str]]:
    """What goes on to an engine: nothing that would rank, route or pay."""
    on = [("Content-Type", "application/json"), ("X-Request-Id", name)]
    for field, title, form in _PASSED:
        value = headers.get(field)
        if value is not None and form.match(value):
            on.append((title, value.decode()))
    return on


def check_json(headers: dict[bytes, bytes]) -> None:
    """Raises a Fault if the body is not said to be plain JSON."""
    kind = headers.get(b"content-type", b"application/json")
    if kind != b"application/json" and not _JSON.match(kind):
        raise Fault(415, "media", "The content-type must be application/json.", code="unsupported_media_type")
    if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        raise Fault(415, "media", "The body must not be compressed.", code="unsupported_media_type")


def session(headers: dict[bytes, bytes]) -> str:
    """The session that the client names, or ""."""
    given = headers.get(b"x-session-id", b"")
    return given.decode() if _NAME.match(given) else ""


def patience_s(headers: dict[bytes, bytes]) -> float:
    """How long the client waits for an answer to begin; inf where it does not tell."""
    given = headers.get(b"x-request-timeout-s") or headers.get(b"x-stainless-read-timeout") or b""
    return float(given) if _SECONDS.match(given) else float("inf")


def too_large(message: str) -> Fault:
    """431."""
    return Fault(431, "limit", message, code="headers_too_large", headers=[(b"connection", b"close")])
