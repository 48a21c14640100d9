"""A small GET that neither waits nor reads for long."""

from __future__ import annotations

import asyncio
import errno
import json
from typing import Any

from lengthwise.gateway.fleet.health import REFUSED, SILENT, UNWELL


class MissError(Exception):
    """No answer came.

    Attributes:
        kind: REFUSED (nobody listens), SILENT (too late) or UNWELL (the connection broke).
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


async def get(session: Any, url: str, *, within_s: float, most_bytes: int) -> tuple[int, bytes]:
    """Status and at most so many bytes of the body.

    Raises:
        MissError: No answer came in time.
    """
    import aiohttp

    try:
        async with asyncio.timeout(within_s), session.get(url, allow_redirects=False) as answer:
            parts, size = [], 0
            while size < most_bytes and (part := await answer.content.readany()):
                parts.append(part)
                size += len(part)
            if not answer.content.at_eof():
                answer.close()
            return int(answer.status), b"".join(parts)[:most_bytes]
    except TimeoutError:
        raise MissError(SILENT, f"no answer within {within_s:g} s") from None
    except aiohttp.ClientConnectorError as error:
        why = getattr(error, "os_error", error)  # one about a certificate has none
        refused = getattr(why, "errno", None) == errno.ECONNREFUSED
        detail = "nobody listens there" if refused else f"no connection: {why}"[:200]
        raise MissError(REFUSED if refused else UNWELL, detail) from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise MissError(UNWELL, f"the connection broke: {error!r}"[:200]) from None


def parsed(body: bytes) -> Any:
    """JSON, or None where it is none."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None
