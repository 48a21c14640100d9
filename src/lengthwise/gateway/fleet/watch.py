"""Watching one engine: is it there, what can it do, how does it fare."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import replace

from lengthwise.gateway.clock import Clock
from lengthwise.gateway.config import Care, Engine
from lengthwise.gateway.fleet._http import MissError, get
from lengthwise.gateway.fleet.facts import find_facts, find_models, greeted
from lengthwise.gateway.fleet.health import REFUSED, UNWELL
from lengthwise.gateway.fleet.signals import MOST_BYTES, Reading, read
from lengthwise.gateway.fleet.worker import Worker
from lengthwise.schema.errors import InputError

_log = logging.getLogger("lengthwise.gateway")
_JITTER = 0.2
_LEAST_S = 0.1
"""Between two checks, even where requests fail."""
_BODY_BYTES = 1 << 16
MODELS_EVERY_S = 30.0
WHERE = ("url", "name", "kind", "api_key", "tls")
"""Of an engine: where one of these changes, it is another one, or is spoken to otherwise."""
HELLO_FIRST_S, HELLO_MOST_S = 1.0, 60.0
"""An engine that did not answer the tiny prompt is asked again after the first, then after twice as long each time."""


class Watch:
    """Keeps one worker's health, facts and signals fresh until it is cancelled.

    Args:
        worker: Whose.
        care: How often, how long.
        adapt_every_s: Between two looks at signals.
        clock: The gateway's.
        changed: Called after every change; with True where requests must know at once.
        priority: Whether it matters that the engine takes priorities.
        dice: Of the jitter.
    """

    def __init__(
        self,
        worker: Worker,
        care: Care,
        adapt_every_s: float,
        clock: Clock,
        changed: Callable[[bool], None],
        *,
        priority: bool,
        dice: random.Random,
    ) -> None:
        self.worker, self.checked = worker, asyncio.Event()
        self._care, self._every_s, self._clock = care, adapt_every_s, clock
        self._changed, self._priority, self._dice = changed, priority, dice
        self._wake = asyncio.Event()
        self._path = "/v1/models" if worker.engine.kind in ("openai", "transformers") else "/health"
        self._models_s = self._hello_s = float("-inf")
        self._hello_rest_s = HELLO_FIRST_S

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._look_after())
            group.create_task(self._scrape())

    def configure(self, care: Care, adapt_every_s: float) -> None:
        """From now on so often and so long."""
        self._care, self._every_s = care, adapt_every_s

    def follow(self, engine: Engine) -> bool:
        """Takes other settings for the engine that is there; False where it is another, or reached otherwise."""
        worker, before = self.worker, self.worker.engine
        if any(getattr(engine, name) != getattr(before, name) for name in WHERE):
            return False
        worker.engine = engine
        if engine.generation_defaults != before.generation_defaults:
            fills_in = False if engine.generation_defaults == "none" else None
            worker.facts = replace(worker.facts, abilities=replace(worker.abilities, own_defaults=fills_in))
        return True

    def look(self) -> None:
        """Checks as soon as may be: a request could not even be sent."""
        self._wake.set()

    async def _look_after(self) -> None:
        while True:
            try:
                await self._check()
            except Exception:  # noqa: BLE001 - one engine's oddity must not end the watch
                _log.exception("engine %s: the check itself failed", self.worker.name)
            self.checked.set()
            await asyncio.sleep(_LEAST_S)
            rest_s = self._care.health_every_s * self._dice.uniform(1 - _JITTER, 1 + _JITTER) - _LEAST_S
            try:
                async with asyncio.timeout(max(0.0, rest_s)):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    async def _check(self) -> None:
        worker, refused = self.worker, self.worker.health.was_refused
        bad = await self._unwell()
        if bad is not None:
            if worker.health.bad(self._clock(), *bad):
                _log.warning("engine %s is down: %s", worker.name, bad[1])
                self._changed(True)
            return
        if refused and worker.asked:
            await self._came_back()
        came = worker.health.good(self._clock())
        if not worker.asked:
            await self._ask()
        elif self._clock() - self._models_s > MODELS_EVERY_S:
            await self._refresh()
        if worker.asked and not worker.facts.heard and self._clock() - self._hello_s >= self._hello_rest_s:
            await self._greet()
        if came:
            if worker.asked:
                _log.info("engine %s is up: %s %s", worker.name, worker.kind, worker.abilities.version)
            self._changed(True)

    async def _unwell(self) -> tuple[str, str] | None:
        """What is wrong, None nothing."""
        try:
            status = await self._status()
            if status in (404, 405) and self._path == "/health":
                self._path = "/v1/models"
                status = await self._status()
        except MissError as miss:
            return miss.kind, str(miss)
        return None if 200 <= status < 300 else (UNWELL, f"http {status} at {self._path}")

    async def _status(self) -> int:
        url = self.worker.url + self._path
        status, _ = await get(self.worker.session, url, within_s=self._care.connect_s, most_bytes=_BODY_BYTES)
        return status

    async def _came_back(self) -> None:
        """It was gone and is here again: another process, unless it shows that it is the same."""
        worker, before = self.worker, self.worker.reading
        now = await self._read()
        known = before is not None and now is not None and before.started is not None
        if known and before is not None and now is not None and now.started == before.started:
            return
        worker.restarted()
        worker.reading, worker.asked = now, False

    async def _ask(self) -> None:
        """Finds out what it can do; until that is known it gets no requests."""
        worker = self.worker
        try:
            worker.facts = await find_facts(worker.engine, worker.session, priority=self._priority)
        except InputError as error:
            if worker.obstacle != str(error):
                _log.warning("engine %s cannot be used: %s", worker.name, error)
            worker.obstacle = str(error)
            return
        worker.asked, worker.obstacle = True, ""
        self._models_s = self._hello_s = self._clock()
        self._hello_rest_s = HELLO_FIRST_S
        self._changed(True)

    async def _refresh(self) -> None:
        """What may change while it runs: its models (adapters)."""
        worker, self._models_s = self.worker, self._clock()
        models = await find_models(worker.engine, worker.session)
        if models and models != worker.abilities.models:
            worker.facts = replace(worker.facts, abilities=replace(worker.abilities, models=models))
            self._changed(True)

    async def _greet(self) -> None:
        """Once more what it did not tell while it was busy."""
        worker = self.worker
        facts = await greeted(worker.engine, worker.session, worker.facts, priority=self._priority)
        self._hello_s, self._hello_rest_s = self._clock(), min(2 * self._hello_rest_s, HELLO_MOST_S)
        worker.facts = replace(facts, abilities=replace(facts.abilities, models=worker.abilities.models))
        self._changed(True)

    async def _scrape(self) -> None:
        while True:
            await asyncio.sleep(self._every_s * self._dice.uniform(1 - _JITTER / 4, 1))
            worker = self.worker
            if not (worker.health.up and worker.asked and worker.abilities.metrics):
                continue
            try:
                reading = await self._read()
            except Exception:  # noqa: BLE001 - as above
                _log.exception("engine %s: its metrics could not be read", worker.name)
                continue
            if reading is not None:
                self._take(reading)

    def _take(self, reading: Reading) -> None:
        worker = self.worker
        slept = worker.reading is not None and worker.reading.sleeping
        again = worker.take(reading)
        if again:
            _log.warning("engine %s started anew", worker.name)
            worker.asked = False
            self.look()
        self._changed(again or slept != reading.sleeping)

    async def _read(self) -> Reading | None:
        worker = self.worker
        try:
            status, body = await get(
                worker.session, f"{worker.url}/metrics", within_s=self._care.connect_s, most_bytes=MOST_BYTES
            )
        except MissError as miss:
            if miss.kind == REFUSED:
                self.look()
            return None
        return read(body, self._clock()) if status == 200 else None
