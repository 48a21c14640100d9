"""Rounds of the same burst through two gateways in turns, FCFS and ISRTF; what clients saw."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lengthwise.gateway.config import Engine, Forecasting, GatewayConfig, Listen, Order
from lengthwise.gateway.demo.engines import MODEL, SEATS, Engines
from lengthwise.gateway.demo.traffic import Question, body, burst
from lengthwise.predict.contract import Prompts
from lengthwise.predict.distribution import LengthDistribution

if TYPE_CHECKING:
    from lengthwise.gateway.serve import Gateway

Floats = npt.NDArray[np.float64]
MODES = ("fcfs", "isrtf")
REQUESTS = 48
_LOOK_S = 0.25
_WARM = 1 << 20
"""Number of the burst that nobody counts."""
_LEVEL = 0.95


@dataclass
class Side:
    """One of the two.

    Attributes:
        mode: Its order.
        port: Of clients.
        admin_port: Of its page.
        rounds: JCT of the rounds that are over.
        jct_s: Of the round under way.
        waiting: Requests now.
        running: Requests now.
        cuts: In all.
    """

    mode: str
    port: int = 0
    admin_port: int | None = None
    rounds: list[Floats] = field(default_factory=list)
    jct_s: list[float] = field(default_factory=list)
    waiting: int = 0
    running: int = 0
    cuts: int = 0

    @property
    def seen(self) -> Floats:
        """[n] JCT of all that have finished."""
        return np.concatenate([*self.rounds, np.array(self.jct_s, float)])


@dataclass(frozen=True)
class Gain:
    """Changes of mean and 99th percentile of JCT, as shares; of the mean a 95 % interval over rounds."""

    mean: float
    low: float
    high: float
    p99: float
    rounds: int

    @property
    def is_sure(self) -> bool:
        """Whether the interval is of gains alone."""
        return self.high < 0


def gain(sides: Sequence[Side]) -> Gain:
    """ISRTF against FCFS over the rounds that both have ended: of each round's ratio, its Student's t."""
    first, ours = (side.rounds for side in sides)
    rounds = min(len(first), len(ours))
    if rounds == 0:
        return Gain(math.nan, math.nan, math.nan, math.nan, 0)
    logs = np.log([float(b.mean() / a.mean()) for a, b in zip(first, ours, strict=False)])
    half = math.inf
    if rounds > 1:
        from scipy import stats

        half = float(stats.t.ppf((1 + _LEVEL) / 2, rounds - 1) * logs.std(ddof=1) / math.sqrt(rounds))
    middle = float(logs.mean())
    ends = [float(np.quantile(np.concatenate(one[:rounds]), 0.99)) for one in (first, ours)]
    return Gain(
        math.exp(middle) - 1,
        math.exp(middle - half) - 1,
        math.exp(middle + half) - 1,
        ends[1] / ends[0] - 1,
        rounds,
    )


class Shrunk:
    """What the shipped predictor says, in the shorter tokens of slow engines."""

    asks_once = True

    def __init__(self, by: float) -> None:
        from lengthwise.predict import default

        self._inner, self._by = default(), by

    def predict(self, prompts: Prompts, tokens_so_far: Any = 0) -> LengthDistribution:
        """Distributions of whole lengths."""
        del tokens_so_far
        return LengthDistribution.of(np.maximum(1.0, self._inner.predict(prompts).tokens / self._by))


async def race(
    engines: Engines,
    ports: Sequence[tuple[int, int]],
    *,
    seconds: float,
    seed: int,
    requests: int = REQUESTS,
    look: Callable[[Sequence[Side], float], None] = lambda *_: None,
) -> tuple[Side, ...]:
    """Both sides when the time is over; at least two rounds, each begun by another side.

    Args:
        engines: Behind both gateways, one gateway at a time.
        ports: (of clients, of the admin page) of each.
        seconds: No round begins after it.
        seed: Of the requests.
        requests: Of a round.
        look: Shown the sides, and the seconds so far, every now and then.
    """
    loop = asyncio.get_running_loop()
    of_burst = partial(burst, seed, tokens_per_s=engines.tokens_per_s, shrink=engines.shrink)
    sides = tuple(Side(mode) for mode in MODES)
    async with AsyncExitStack() as stack:
        gateways = [
            await stack.enter_async_context(_gateway(engines, s.mode, p))
            for s, p in zip(sides, ports, strict=True)
        ]
        for side, gateway in zip(sides, gateways, strict=True):
            side.port, side.admin_port = gateway.port, gateway.admin_port
            await gateway.fleet.settled(30.0)
            await _round(gateway, Side(side.mode), of_burst(_WARM, 8))
        begun_s = loop.time()
        shows = asyncio.ensure_future(_shown(sides, gateways, begun_s, look))
        try:
            number = 0
            while number < 2 or loop.time() - begun_s < seconds:
                asked = of_burst(number, requests)
                for k in (0, 1) if number % 2 == 0 else (1, 0):
                    await _round(gateways[k], sides[k], asked)
                number += 1
        finally:
            shows.cancel()
            await asyncio.gather(shows, return_exceptions=True)
            _look(sides, gateways)
            look(sides, loop.time() - begun_s)
    return sides


def _gateway(engines: Engines, mode: str, ports: tuple[int, int]) -> Gateway:
    from lengthwise.gateway.forecast import Forecaster
    from lengthwise.gateway.serve import Gateway

    config = GatewayConfig(
        engines=tuple(
            Engine(url, name=f"engine {k + 1}", in_flight=SEATS, generation_defaults="none")
            for k, url in enumerate(engines.urls)
        ),
        order=Order(mode),
        forecasting=Forecasting(learn=False),
        listen=Listen(port=ports[0], admin_port=ports[1]),
    )
    predictor = Shrunk(engines.shrink)
    return Gateway(
        config, make_forecaster=lambda *told: Forecaster(*told, predictor=predictor, place="inline")
    )


async def _round(gateway: Gateway, side: Side, asked: Sequence[Question]) -> None:
    """One burst through one gateway."""
    import aiohttp

    loop = asyncio.get_running_loop()
    begun_s = loop.time() + 0.05
    url = f"http://127.0.0.1:{gateway.port}/v1/completions"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(question: Question) -> None:
            await asyncio.sleep(begun_s + question.due_s - loop.time())
            async with session.post(url, json=body(MODEL, question)) as answer:
                told = await answer.read()
                if answer.status != 200 or not told.endswith(b"data: [DONE]\n\n"):
                    raise RuntimeError(f"an answer of the demo failed: {answer.status} {told[-300:]!r}")
            side.jct_s.append(loop.time() - begun_s - question.due_s)

        await asyncio.gather(*(one(question) for question in asked))
    side.rounds.append(np.array(side.jct_s))
    side.jct_s = []


async def _shown(
    sides: Sequence[Side],
    gateways: Sequence[Gateway],
    begun_s: float,
    look: Callable[[Sequence[Side], float], None],
) -> None:
    while True:
        _look(sides, gateways)
        look(sides, asyncio.get_running_loop().time() - begun_s)
        await asyncio.sleep(_LOOK_S)


def _look(sides: Sequence[Side], gateways: Sequence[Gateway]) -> None:
    for side, gateway in zip(sides, gateways, strict=True):
        now = gateway.hub.statistics()
        side.waiting, side.running, side.cuts = now.waiting, now.running, now.cuts
