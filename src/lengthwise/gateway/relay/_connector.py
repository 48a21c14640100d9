"""aiohttp's connector, which owns the lines as well: they end with the session."""

from __future__ import annotations

from typing import Any

import aiohttp

from lengthwise.gateway.relay._lines import Lines


class Connector(aiohttp.TCPConnector):
    """For one engine.

    Attributes:
        lines: Connections for the requests of clients.
    """

    def __init__(self, lines: Lines, **named: Any) -> None:
        super().__init__(**named)
        self.lines = lines

    def close(self, **named: Any) -> Any:
        """Closes all connections."""
        self.lines.close()
        return super().close(**named)
