"""One engine: what is known of it now, and whether it may be given requests."""

from __future__ import annotations

import math
from typing import Any
from urllib.parse import urlsplit

from lengthwise.backend.openai import Abilities, Server
from lengthwise.gateway.config import Care, Dispatch, Engine
from lengthwise.gateway.decisions import Signals, WorkerState
from lengthwise.gateway.fleet.breaker import CLOSED, HALF_OPEN, OPEN, Breaker
from lengthwise.gateway.fleet.facts import Facts
from lengthwise.gateway.fleet.health import Health
from lengthwise.gateway.fleet.signals import Reading
from lengthwise.gateway.relay import open_session

STALE_TIMES = 3.0
"""Signals older than so many looks say nothing any more."""
RAMP_S = 1.0
"""An engine that came back is given 1, 2, 4, ... requests at once, twice as many after each of these."""
_LEAST_RATE_S = 0.05


class Worker:
    """An engine behind the gateway.

    Attributes:
        name: Unique.
        url: Its address without ``/v1``.
        engine: As it was configured.
        session: aiohttp's, with its key and certificates.
        facts: What it is and can do.
        asked: Whether ``facts`` are of the engine that is there now.
        obstacle: Why it could not be asked, "" nothing.
        health: By its health checks.
        breaker: By the requests that it was given.
        epoch: Grows when it started anew.
        draining: No new requests: discovery says that it is going.
        ejected: No new requests: it fares far worse than its peers.
        was: How it was called before another one took its name; "" never otherwise.
    """

    def __init__(self, engine: Engine, care: Care, dispatch: Dispatch, *, epoch: int = 0) -> None:
        self.engine, self.url, self.name = engine, Server(engine.url).root, name_of(engine)
        self.session: Any = open_session(engine, care)
        self.facts, self.asked, self.obstacle = Facts(), False, ""
        self.health, self.breaker = Health(), Breaker(care.failures, care.open_s)
        self.epoch = epoch
        self.draining = self.ejected = False
        self.was = ""
        self.reading: Reading | None = None
        self.tokens_per_s: float | None = None
        self._dispatch = dispatch
        self._was_well = self._ever_well = False
        self._back_s = -math.inf

    @property
    def kind(self) -> str:
        """Whose engine it is: "vllm", "sglang", ..., "" not known yet."""
        return self.abilities.engine or ("" if self.engine.kind == "auto" else self.engine.kind)

    @property
    def abilities(self) -> Abilities:
        """What it was found to do."""
        return self.facts.abilities

    @property
    def priority_sign(self) -> int:
        """1: smaller priorities go first there, -1: larger, 0: it takes none (or nobody asked)."""
        return self.facts.priority_sign

    def priorities(self) -> str:
        """What becomes of the priorities that it is told in mode engine-priority, in words; "" all is well."""
        facts = self.facts
        if not self.asked or (facts.priority_sign and facts.orders):
            return ""
        if facts.priority_sign:
            return "takes priorities; whether it orders by them cannot be seen"
        if facts.orders is None and not facts.heard:
            return "has not said yet whether it takes priorities; it is sent none"
        if facts.orders is None and not self.engine.probe and self.kind == "vllm":
            return "was not asked whether it takes priorities (probe = false); it is sent none"
        return "takes no priorities, so its order stays its own; it is sent none"

    def speaks(self, model: str) -> bool:
        """Whether it serves the model."""
        return model in self.abilities.models

    def trouble(self, now_s: float) -> str:
        """Why it gets no requests, in a few words; "" where it does."""
        if not self.health.up:
            return f"down: {self.health.detail}"
        if not self.asked:
            return f"starting: {self.obstacle or 'being asked what it can do'}"
        if self.reading is not None and self.reading.sleeping:
            return "sleeping"
        if self.breaker.state(now_s) == OPEN:
            return "circuit open"
        if self.ejected:
            return "worse than its peers"
        return "draining" if self.draining else ""

    def state(self, now_s: float) -> WorkerState:
        """It now, for the scheduler."""
        self._note_return(now_s)
        return WorkerState(
            self.name,
            self.abilities.models,
            up=not self.trouble(now_s),
            in_flight=self._limit(now_s),
            slots=self.facts.slots,
            kv_tokens=self.facts.kv_tokens,
            tokens_per_s=self.tokens_per_s if self._fresh(now_s) else None,
            signals=self._signals(now_s),
            epoch=self.epoch,
            was=self.was,
            place=self.url,
        )

    def next_s(self, now_s: float) -> float:
        """When its state changes although nothing happens; inf never."""
        steps_s = math.inf
        if self._ramp(now_s) is not None:
            steps_s = self._back_s + RAMP_S * (math.floor((now_s - self._back_s) / RAMP_S) + 1)
        stale_s = self._stale_s()
        return min(self.breaker.next_s(now_s), steps_s, stale_s if stale_s > now_s else math.inf)

    def take(self, reading: Reading) -> bool:
        """Notes what it tells now; whether it started anew since the last time."""
        before, self.reading = self.reading, reading
        if before is None:
            return False
        if not reading.follows(before):
            self.restarted()
            self.reading = reading
            return True
        passed_s = reading.signals.at_s - before.signals.at_s
        if reading.tokens is not None and before.tokens is not None and passed_s > _LEAST_RATE_S:
            self.tokens_per_s = (reading.tokens - before.tokens) / passed_s
        return False

    def restarted(self) -> None:
        """Nothing of what it had is there any more."""
        self.epoch += 1
        self.reading = self.tokens_per_s = None
        self.breaker.reset()

    def make_way(self) -> None:
        """Another one takes its name: it ends what it has under a name of its own."""
        self.was, self.name = self.name, f"{self.name} (leaving {self.epoch})"
        self.draining = True

    async def close(self) -> None:
        """Closes its connections."""
        await self.session.close()

    def _note_return(self, now_s: float) -> None:
        """Its way back begins where it was well, was not, and is again; going and coming alone is none."""
        well = self.trouble(now_s) in ("", "draining")
        if well and not self._was_well and self._ever_well:
            self._back_s = now_s
        self._was_well = well
        self._ever_well |= well

    def _limit(self, now_s: float) -> int | None:
        if self.breaker.state(now_s) == HALF_OPEN:
            return 1
        ramp = self._ramp(now_s)
        return self.engine.in_flight if ramp is None else ramp

    def _ramp(self, now_s: float) -> int | None:
        """The cap on its way back; None where it has none."""
        full = self.engine.in_flight or self.facts.slots or self._dispatch.start
        steps = (now_s - self._back_s) / RAMP_S
        if steps >= math.log2(full) or self.breaker.state(now_s) != CLOSED:
            return None
        return min(full, int(2 ** max(0, math.floor(steps))))

    def _stale_s(self) -> float:
        if self.reading is None:
            return -math.inf
        return self.reading.signals.at_s + STALE_TIMES * self._dispatch.adapt_every_s

    def _fresh(self, now_s: float) -> bool:
        return now_s < self._stale_s()

    def _signals(self, now_s: float) -> Signals:
        if self.reading is None:
            return Signals()
        signals = self.reading.signals
        return signals if self._fresh(now_s) else Signals(at_s=signals.at_s)


def name_of(engine: Engine) -> str:
    """How an engine is called: as configured, or host and port."""
    return engine.name or urlsplit(engine.url).netloc.rpartition("@")[2]
