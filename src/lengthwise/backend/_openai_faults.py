"""What went wrong on the way to a server, by a few names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
        refused = isinstance(error.os_error, ConnectionRefusedError)
        raise RequestError("refused" if refused else "no connection", str(error)) from error
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
