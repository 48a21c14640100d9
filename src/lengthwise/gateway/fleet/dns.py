"""Engines behind a name: every address of a headless Service is one."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from lengthwise.gateway.config import Engine
from lengthwise.gateway.fleet.found import Tell, at, split_port
from lengthwise.schema.errors import InputError

_log = logging.getLogger("lengthwise.gateway")
_LOOKUP_S, _LEAST_S = 10.0, 0.01
Lookup = Callable[[str, int], Awaitable[list[str]]]


async def addresses(host: str, port: int) -> list[str]:
    """All addresses of a name, by the system's resolver."""
    rows = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(row[4][0]) for row in rows]


class Dns:
    """Looks a name up again and again; while it cannot be looked up, what was found last holds.

    Args:
        place: ``host:port``.
        every_s: Between two looks.
        like: What holds of every engine that is found.
        lookup: By which resolver.

    Raises:
        InputError: The place is no host and port.
    """

    def __init__(self, place: str, every_s: float, like: Engine, *, lookup: Lookup = addresses) -> None:
        rule = "discovery by DNS needs host:port, such as engines.default.svc:8000"
        self._host, port = split_port(place, rule)
        if not port.isdecimal() or not 0 < int(port) < 65536:
            raise InputError(f"{rule}; it is {place!r}")
        self._port, self._every_s, self._like, self._lookup = int(port), every_s, like, lookup
        self._failed = False

    async def run(self, tell: Tell) -> None:
        """Tells every look's engines, until cancelled."""
        while True:
            await self._look(tell)
            await asyncio.sleep(max(_LEAST_S, self._every_s))

    async def _look(self, tell: Tell) -> None:
        try:
            async with asyncio.timeout(_LOOKUP_S):
                found = sorted(set(await self._lookup(self._host, self._port)))
        except (OSError, UnicodeError) as error:  # TimeoutError is an OSError
            if not self._failed:
                _log.warning("%s cannot be looked up, its engines stay as they are: %s", self._host, error)
            self._failed = True
            return
        self._failed = False
        tell([at(address, self._port, self._like) for address in found])
