"""What is answered when a request is not served, in OpenAI's form."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from lengthwise.gateway.request import Rejection

Headers = Sequence[tuple[bytes, bytes]]
_TYPES = {401: "authentication_error", 429: "requests"}
_RETRY_STATUSES = (429, 503)
_SHOWN = 100


class Fault(Exception):  # noqa: N818 - it is an answer, not always an error of ours
    """An answer with an error.

    Args:
        status: Of HTTP.
        reason: One word for metrics.
        message: For people.
        param: The field that is wrong.
        code: One word for programs.
        headers: Further ones of the answer.
        retry_after_s: When to come again; 429 and 503 say 1 s where nobody knows better.
    """

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
        self.param, self.code = param, code
        self.headers = list(headers)
        again_s = 1.0 if status in _RETRY_STATUSES else None
        self.retry_after_s = again_s if retry_after_s is None else retry_after_s

    @property
    def body(self) -> bytes:
        """The error as JSON."""
        server_s = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status, server_s)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def all_headers(self) -> list[tuple[bytes, bytes]]:
        """Those of the answer, content-length and Retry-After (whole seconds, rounded up) included."""
        headers = [(b"content-type", b"application/json"), *self.headers]
        if self.retry_after_s is not None:
            after_s = max(1, math.ceil(min(self.retry_after_s, 86_400.0)))
            headers.append((b"retry-after", b"%d" % after_s))
        return headers

    def as_refusal(self) -> Rejection:
        """The same for listeners."""
        return Rejection(self.status, self.reason, self.message, self.retry_after_s)


def refused(rejection: Rejection) -> Fault:
    """The answer to a request that the scheduler does not let in, or lets go."""
    code = "rate_limit_exceeded" if rejection.status == 429 else rejection.reason
    return Fault(
        rejection.status, rejection.reason, rejection.message, code=code, retry_after_s=rejection.retry_after_s
    )


def bad(param: str | None, message: str, code: str | None = None) -> Fault:
    """400: a field, or the body, cannot be used."""
    return Fault(400, "invalid", message, param=param, code=code)


def no_model(name: str) -> Fault:
    """404 for a model that is not there, or that the key may not see: both alike."""
    message = f"The model {shown(name)} does not exist or you do not have access to it."
    return Fault(404, "model", message, param="model", code="model_not_found")


def draining(retry_after_s: float = 1.0) -> Fault:
    """503 while the gateway ends."""
    return Fault(
        503,
        "draining",
        "The gateway is shutting down; send the request again.",
        code="draining",
        headers=[(b"connection", b"close")],
        retry_after_s=retry_after_s,
    )


def internal() -> Fault:
    """500: our own fault."""
    return Fault(500, "internal", "The gateway failed to serve this request.", code="internal_error")


def shown(text: str) -> str:
    """A short text of the client's in quotes."""
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
