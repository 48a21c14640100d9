"""What went wrong on the way to a server, by a few names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any

from lengthwise.backend._openai_server import RequestError
from lengthwise.schema.errors import MissingExtraError


def library() -> Any:
    """aiohttp; raises MissingExtraError where it is not installed."""
    try:
        import aiohttp
    except ImportError as error:
        raise MissingExtraError("asking a server", "bench") from error
    return aiohttp


def _unconnected(error: Any) -> RequestError:
    """Nobody listens there, or the name or the way is not known; of the address only what was asked for."""
    where = f"{error.host}:{error.port}"
    if isinstance(error.os_error, ConnectionRefusedError):
        return RequestError("refused", f"nobody listens at {where}")
    return RequestError("no connection", f"{where}: {error.os_error.strerror or error.os_error}")


@contextmanager
def named() -> Iterator[None]:
    """Turns what the network raises into a RequestError."""
    aiohttp = library()
    try:
        yield
    except aiohttp.ConnectionTimeoutError as error:
        raise RequestError("no connection", "not within the time for it") from error
    except aiohttp.SocketTimeoutError as error:
        raise RequestError("stalled", "no byte for the longest time allowed") from error
    except TimeoutError as error:
        raise RequestError("timed out", "the request took longer than allowed") from error
    except aiohttp.ClientConnectorError as error:
        raise _unconnected(error) from error
    except aiohttp.ClientPayloadError as error:
        raise RequestError("closed early", str(error)) from error
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionError) as error:
        raise RequestError("reset", str(error)) from error
    except aiohttp.ClientResponseError as error:
        raise RequestError("malformed", f"no HTTP: {error}"[:200]) from error
    except aiohttp.ClientError as error:
        raise RequestError("no connection", repr(error)) from error
    except ValueError as error:
        raise RequestError("malformed", str(error)) from error


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server wants to be left alone: the header Retry-After, a number or a date after its own Date."""
    told = headers.get("Retry-After", "").strip()
    try:
        seconds = float(told)
    except ValueError:
        seconds = _between(headers.get("Date", ""), told)
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _between(first: str, last: str) -> float:
    """Seconds between two dates of HTTP; NaN where one is none."""
    try:
        return (parsedate_to_datetime(last) - parsedate_to_datetime(first)).total_seconds()
    except (TypeError, ValueError):
        return math.nan
