"""Whether the packages are there that a gateway needs."""

from __future__ import annotations

from lengthwise.schema.errors import MissingExtraError


def require_extra() -> None:
    """Raises MissingExtraError where the extra ``gateway`` is not installed."""
    try:
        import aiohttp  # noqa: F401
        import httptools  # noqa: F401
        import msgspec  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("lengthwise serve", "gateway") from error
