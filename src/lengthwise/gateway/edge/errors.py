"""Error responses in the form of the API that the client uses."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lengthwise.gateway.apis import error_body
from lengthwise.gateway.request import DRAINING

Headers = Sequence[tuple[bytes, bytes]]
CONNECTION = "lengthwise.connection"  # ASGI extension with the ``HttpProtocol`` of the connection
_MAX_QUOTED = 100


class Fault(Exception):  # noqa: N818 - a response, not always an error of the gateway
    """An error response with a ``reason`` for metrics, a ``code`` for programs, and the invalid field (``param``)."""

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Headers = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.reason, self.message = status, reason, message
        self.param, self.code, self.headers = param, code, list(headers)
        self.retry_after_s = 1.0 if retry_after_s is None and status in (429, 503) else retry_after_s

    @property
    def body(self) -> bytes:
        """The error as a JSON object in OpenAI's form."""
        return self.encode(is_anthropic=False)

    def encode(self, *, is_anthropic: bool) -> bytes:
        """Return the error as a JSON object in OpenAI's or in Anthropic's form."""
        return error_body(self.status, self.message, param=self.param, code=self.code, is_anthropic=is_anthropic)

    def all_headers(self) -> list[tuple[bytes, bytes]]:
        """Return the response headers, with content-type and Retry-After (integer seconds, rounded up)."""
        headers = [(b"content-type", b"application/json"), *self.headers]
        if self.retry_after_s is not None:
            after_s = max(1, math.ceil(min(self.retry_after_s, 31 * 86_400.0)))
            headers.append((b"retry-after", b"%d" % after_s))
        return headers


def invalid(param: str | None, message: str, code: str | None = None, status: int = 400) -> Fault:
    """Return the Fault for an invalid field, body or head."""
    return Fault(status, "invalid", message, param=param, code=code)


def unknown_model(name: str) -> Fault:
    """Return the Fault 404, the same for a model that does not exist and for one that the key cannot access."""
    message = f"The model {quoted(name)} does not exist or you do not have access to it."
    return Fault(404, "model", message, param="model", code="model_not_found")


def draining() -> Fault:
    """Return the Fault 503 for a request during shutdown."""
    return Fault(503, "draining", DRAINING.message, code="draining", headers=[(b"connection", b"close")])


def quoted(text: str) -> str:
    """Return a client's text in quotes, cut after 100 characters."""
    return repr(text if len(text) <= _MAX_QUOTED else text[:_MAX_QUOTED] + "...")
