"""Where engines come from, together: the listed ones, and those that are found."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lengthwise.gateway.config import GatewayConfig
from lengthwise.gateway.fleet.dns import Dns
from lengthwise.gateway.fleet.endpoint_slices import EndpointSlices
from lengthwise.gateway.fleet.found import Found, Tell
from lengthwise.gateway.fleet.worker import name_of
from lengthwise.schema.errors import InputError

_log = logging.getLogger("lengthwise.gateway")
_AGAIN_S = 5.0
_Run = Callable[[Tell], Coroutine[Any, Any, None]]


def listed(config: GatewayConfig) -> list[Found]:
    """The engines that the configuration lists.

    Raises:
        InputError: Two have one name.
    """
    found = [Found(name_of(engine), replace(engine, name=name_of(engine))) for engine in config.engines]
    names = [one.name for one in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(
            f"every engine must have a name of its own; {twice[0]!r} is there twice: set its name"
        )
    return found


@dataclass(frozen=True)
class Plan:
    """A configuration that can be gone over to; ``runs`` None: the sources stay."""

    config: GatewayConfig
    listed: tuple[Found, ...]
    runs: dict[str, _Run] | None


class Discoveries:
    """All sources; whoever is listed comes before whoever is found under the same name.

    Args:
        config: The gateway's.
        wanted: Called with all engines whenever a source told something new.
        dice: Of waits.
    """

    def __init__(
        self, config: GatewayConfig, wanted: Callable[[Sequence[Found]], None], *, dice: random.Random
    ) -> None:
        self._discovery, self._wanted, self._dice = config.discovery, wanted, dice
        self._by_source: dict[str, tuple[Found, ...]] = {"listed": tuple(listed(config))}
        self._runs = self._sources(config)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Tells the listed ones and begins to look for others."""
        self._all()
        self._tasks = [
            asyncio.create_task(self._keep(source, run), name=f"discovery by {source}")
            for source, run in self._runs.items()
        ]

    async def stop(self) -> None:
        """Looks no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    def plan(self, config: GatewayConfig) -> Plan:
        """What another configuration would mean; raises InputError where it cannot be."""
        same = config.discovery == self._discovery
        return Plan(config, tuple(listed(config)), None if same else self._sources(config))

    async def follow(self, plan: Plan) -> None:
        """Goes over to another configuration."""
        self._discovery, self._by_source["listed"] = plan.config.discovery, plan.listed
        if plan.runs is None:
            self._all()
            return
        await self.stop()
        self._runs = plan.runs
        for source in [one for one in self._by_source if one != "listed" and one not in self._runs]:
            del self._by_source[source]
        await self.start()

    def _sources(self, config: GatewayConfig) -> dict[str, _Run]:
        told = config.discovery
        runs: dict[str, _Run] = {}
        if told.dns:
            runs["DNS"] = Dns(told.dns, told.every_s, told.engine).run
        if told.endpoint_slices:
            slices = EndpointSlices(told.endpoint_slices, told.engine, api_url=told.api_url, dice=self._dice)
            runs["EndpointSlices"] = slices.run
        return runs

    async def _keep(self, source: str, run: _Run) -> None:
        while True:
            try:
                await run(lambda found: self._took(source, found))
            except Exception:  # noqa: BLE001 - discovery goes on, whatever somebody sends it
                _log.exception("discovery by %s failed, the engines stay as they are", source)
            await asyncio.sleep(_AGAIN_S)

    def _took(self, source: str, found: Sequence[Found]) -> None:
        if self._by_source.get(source) != tuple(found):
            self._by_source[source] = tuple(found)
            self._all()

    def _all(self) -> None:
        by_name: dict[str, Found] = {}
        places: set[str] = set()
        for source in ("listed", *self._runs):
            for one in self._by_source.get(source, ()):
                if one.name not in by_name and one.engine.url not in places:
                    by_name[one.name] = one
                    places.add(one.engine.url)
        self._wanted(list(by_name.values()))
