"""Engines of a Kubernetes Service: its EndpointSlices listed, then watched."""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import aclosing
from pathlib import Path
from typing import Any

from lengthwise.gateway.config import Engine
from lengthwise.gateway.fleet.found import Tell, split_port
from lengthwise.gateway.fleet.kube import ACCOUNT, ExpiredError, Kube, NoAnswerError
from lengthwise.gateway.fleet.slices import SERVICE_LABEL, Slices
from lengthwise.schema.errors import InputError

_log = logging.getLogger("lengthwise.gateway")
_RULE = "discovery by EndpointSlices needs namespace/service:port, such as default/engines:8000"
LASTS_S, SILENT_S = 300.0, 150.0
FIRST_WAIT_S, MOST_WAIT_S = 0.2, 30.0
_LONG_S = 1.0
"""A watch that lasted longer was a good one, even if nothing happened."""


class EndpointSlices:
    """The engines of a Service, told anew whenever its slices change.

    Lists once, then watches from the version of the list. A watch that ends is gone on with from the last
    version that was seen; one whose version is too old, or that sent what cannot be understood, begins with a
    list. While the API does not answer, what was found last holds, and it is asked again after 0.2 s, twice
    as long each time, at most 30 s, by chance up to half shorter. The role needs get, list and watch of
    ``endpointslices`` in the namespace.

    Args:
        place: ``namespace/service:port``, the port a number or a name.
        like: What holds of every engine.
        api_url: Of the API; None: as a pod finds it.
        account: Folder of the token and the authority.
        lasts_s: How long a watch is asked to last.
        silent_s: A watch without a word for so long is begun again.
        dice: Of the waits.

    Raises:
        InputError: The place is none, or there is no API to ask.
    """

    def __init__(
        self,
        place: str,
        like: Engine,
        *,
        api_url: str | None = None,
        account: Path = ACCOUNT,
        lasts_s: float = LASTS_S,
        silent_s: float = SILENT_S,
        dice: random.Random | None = None,
    ) -> None:
        where, port = split_port(place, _RULE)
        namespace, slash, service = where.partition("/")
        if not (namespace and slash and service) or "/" in service:
            raise InputError(f"{_RULE}; it is {place!r}")
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._selector = f"{SERVICE_LABEL}={service}"
        self._slices, self._kube = Slices(port, like), Kube(api_url, account=account)
        self._lasts_s, self._silent_s = lasts_s, silent_s
        self._dice = dice or random.Random()  # noqa: S311 - waits, not secrets
        self._version = ""
        self._wait_s, self._said = FIRST_WAIT_S, ""

    async def run(self, tell: Tell) -> None:
        """Tells the engines after every change, until cancelled."""
        async with self._kube:
            while True:
                await self._once(tell)

    async def _once(self, tell: Tell) -> None:
        """A list, where it is needed, and a watch to its end."""
        import aiohttp

        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            if not self._version:
                await self._list(tell)
            await self._watch(tell)
        except ExpiredError:
            self._version = ""
            await self._rest("the version is too old, listing again", quietly=True)
        except NoAnswerError as error:
            if error.status not in (401, 429) and not 500 <= error.status < 600:
                self._version = ""
            await self._rest(str(error))
        except (aiohttp.ClientError, OSError, ValueError) as error:  # TimeoutError is an OSError
            if loop.time() - began_s > _LONG_S:
                self._well()
            await self._rest(f"{type(error).__name__}: {error}")
        else:
            if loop.time() - began_s < _LONG_S:
                await self._rest("the watch ended at once", quietly=True)

    async def _list(self, tell: Tell) -> None:
        items, version = await self._kube.list(self._path, self._selector)
        self._slices.replace(items)
        self._version = version
        self._well()
        tell(self._slices.found())

    async def _watch(self, tell: Tell) -> None:
        events = self._kube.watch(
            self._path, self._selector, self._version, lasts_s=self._lasts_s, silent_s=self._silent_s
        )
        async with aclosing(events):
            async for event in events:
                self._well()
                if self._take(event):
                    tell(self._slices.found())

    def _take(self, event: dict[str, Any]) -> bool:
        """Whether it is a change."""
        item, kind = event["object"], event.get("type")
        version = (item.get("metadata") or {}).get("resourceVersion")
        if version:
            self._version = str(version)
        if kind in ("ADDED", "MODIFIED"):
            self._slices.put(item)
        elif kind == "DELETED":
            self._slices.drop(item)
        return kind in ("ADDED", "MODIFIED", "DELETED")

    def _well(self) -> None:
        self._wait_s, self._said = FIRST_WAIT_S, ""

    async def _rest(self, why: str, *, quietly: bool = False) -> None:
        """Waits, longer each time in a row."""
        if not quietly and why != self._said:
            _log.warning("EndpointSlices at %s: %s; the engines stay as they are", self._kube.url, why)
            self._said = why
        await asyncio.sleep(self._wait_s * self._dice.uniform(0.5, 1.0))
        self._wait_s = min(2 * self._wait_s, MOST_WAIT_S)
