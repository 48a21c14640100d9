"""Rounds of the same burst through two gateways in turns, FCFS and ISRTF; what clients saw."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lengthwise.gateway.config import Engine, Forecasting, GatewayConfig, Listen, Order
from lengthwise.gateway.demo.engines import MODEL, SEATS, Engines
from lengthwise.predict.contract import Prompts
from lengthwise.predict.distribution import LengthDistribution

MAX_TOKENS = 1024
LOAD = 3.0
"""Bursts at so many times what the engines can serve, as in ELIS."""
_GAMMA_SHAPE = 0.73
_SPREAD = 0.5
"""Standard deviation of the logarithm of a length around its kind's: no prompt tells its length exactly."""
KINDS = (  # a question, and the tokens that answers to such questions have in the median
    ("What is the capital of {}? Answer in one word.", 6),
    ("Translate into French: I would like to visit {} next spring.", 18),
    ("Summarize in one sentence why people visit {}.", 32),
    ("Explain to a child in a short paragraph where {} is and who lives there.", 100),
    ("Give me five tips for a weekend in {}.", 180),
    ("List twenty places to see in {}, each with a sentence on why it is worth the way.", 500),
    ("Write a detailed essay of several pages about the history of {}, with an introduction and a conclusion.", 750),
    ("Write a Python program with comments and tests that plans a tour of {}, and explain every step.", 600),
)
PLACES = (
    "Peru", "Norway", "Kenya", "Japan", "Portugal", "Vietnam", "Chile", "Iceland", "Morocco", "Canada", "Greece",
    "Nepal",
)  # fmt: skip


@dataclass(frozen=True)
class Question:
    """One request.

    Attributes:
        deadline_s: When it is sent, after the burst began.
        prompt: Its text.
        tokens: How long its answer will be: the engine is told, the gateway is not.
    """

    deadline_s: float
    prompt: str
    tokens: int


def burst(seed: int, number: int, count: int, *, tokens_per_s: float, shrink: float) -> list[Question]:
    """Requests of one burst, the same for the same seed and number.

    Args:
        seed: Of kinds, places, lengths and gaps.
        number: Of the burst.
        count: How many.
        tokens_per_s: That the engines can make.
        shrink: Lengths are divided by it, for slow engines.
    """
    rng = np.random.default_rng([seed, number])
    kinds = rng.integers(len(KINDS), size=count)
    medians = np.array([KINDS[kind][1] for kind in kinds], float)
    lengths = np.clip(medians * np.exp(_SPREAD * rng.standard_normal(count)) / shrink, 1, MAX_TOKENS)
    gap_s = lengths.mean() / tokens_per_s / LOAD
    deadline_s = np.cumsum(rng.gamma(_GAMMA_SHAPE, gap_s / _GAMMA_SHAPE, count))
    places = rng.integers(len(PLACES), size=count)
    return [
        Question(float(due), KINDS[kind][0].format(PLACES[place]), round(float(length)))
        for due, kind, place, length in zip(deadline_s, kinds, places, lengths, strict=True)
    ]


def body(model: str, question: Question) -> dict[str, Any]:
    """What is posted: the length stands where the engine looks and the gateway does not."""
    return {
        "model": model,
        "prompt": question.prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "vllm_xargs": {"output_tokens": question.tokens, "max_tokens": MAX_TOKENS},
    }


if TYPE_CHECKING:
    from lengthwise.gateway.serve import Gateway

Floats = npt.NDArray[np.float64]
MODES = ("fcfs", "isrtf")
REQUESTS = 48
_POLL_INTERVAL_S = 0.25
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
    def is_significant(self) -> bool:
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
        math.exp(middle) - 1, math.exp(middle - half) - 1, math.exp(middle + half) - 1, ends[1] / ends[0] - 1, rounds
    )


class Shrunk:
    """What the shipped predictor says, in the shorter tokens of slow engines."""

    predicts_once = True

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
    poll: Callable[[Sequence[Side], float], None] = lambda *_: None,
) -> tuple[Side, ...]:
    """Both sides when the time is over; at least two rounds, each begun by another side.

    Args:
        engines: Behind both gateways, one gateway at a time.
        ports: (of clients, of the admin page) of each.
        seconds: No round begins after it.
        seed: Of the requests.
        requests: Of a round.
        poll: Shown the sides, and the seconds so far, every now and then.
    """
    loop = asyncio.get_running_loop()
    of_burst = partial(burst, seed, tokens_per_s=engines.tokens_per_s, shrink=engines.shrink)
    sides = tuple(Side(mode) for mode in MODES)
    async with AsyncExitStack() as stack:
        gateways = [
            await stack.enter_async_context(_gateway(engines, s.mode, p)) for s, p in zip(sides, ports, strict=True)
        ]
        for side, gateway in zip(sides, gateways, strict=True):
            side.port, side.admin_port = gateway.port, gateway.admin_port
            await gateway.fleet.stable(30.0)
            await _round(gateway, Side(side.mode), of_burst(_WARM, 8))
        started_s = loop.time()
        shows = asyncio.ensure_future(_shown(sides, gateways, started_s, poll))
        try:
            number = 0
            while number < 2 or loop.time() - started_s < seconds:
                asked = of_burst(number, requests)
                for k in (0, 1) if number % 2 == 0 else (1, 0):
                    await _round(gateways[k], sides[k], asked)
                number += 1
        finally:
            shows.cancel()
            await asyncio.gather(shows, return_exceptions=True)
            _poll(sides, gateways)
            poll(sides, loop.time() - started_s)
    return sides


def _gateway(engines: Engines, mode: str, ports: tuple[int, int]) -> Gateway:
    from lengthwise.gateway.length_prediction import Forecaster
    from lengthwise.gateway.serve import Gateway

    config = GatewayConfig(
        engines=tuple(
            Engine(url, name=f"engine {k + 1}", in_flight=SEATS, generation_defaults="none")
            for k, url in enumerate(engines.urls)
        ),
        order=Order(mode),
        prediction=Forecasting(learn=False),
        listen=Listen(port=ports[0], admin_port=ports[1]),
    )
    predictor = Shrunk(engines.shrink)
    return Gateway(config, make_forecaster=lambda *told: Forecaster(*told, predictor=predictor, place="inline"))


async def _round(gateway: Gateway, side: Side, client_request: Sequence[Question]) -> None:
    """One burst through one gateway."""
    import aiohttp

    loop = asyncio.get_running_loop()
    started_s = loop.time() + 0.05
    url = f"http://127.0.0.1:{gateway.port}/v1/completions"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(question: Question) -> None:
            await asyncio.sleep(started_s + question.deadline_s - loop.time())
            async with session.post(url, json=body(MODEL, question)) as answer:
                told = await answer.read()
                if answer.status != 200 or not told.endswith(b"data: [DONE]\n\n"):
                    raise RuntimeError(f"an answer of the demo failed: {answer.status} {told[-300:]!r}")
            side.jct_s.append(loop.time() - started_s - question.deadline_s)

        await asyncio.gather(*(one(question) for question in client_request))
    side.rounds.append(np.array(side.jct_s))
    side.jct_s = []


async def _shown(
    sides: Sequence[Side], gateways: Sequence[Gateway], started_s: float, poll: Callable[[Sequence[Side], float], None]
) -> None:
    while True:
        _poll(sides, gateways)
        poll(sides, asyncio.get_running_loop().time() - started_s)
        await asyncio.sleep(_POLL_INTERVAL_S)


def _poll(sides: Sequence[Side], gateways: Sequence[Gateway]) -> None:
    for side, gateway in zip(sides, gateways, strict=True):
        now = gateway.driver.statistics()
        side.waiting, side.running, side.cuts = now.waiting, now.running, now.preemptions


if TYPE_CHECKING:
    from rich.table import Table

_SAY_S = 15.0
NAMES = {"fcfs": "first come, first served", "isrtf": "shortest predicted first (ISRTF)"}


@contextmanager
def shown(what: str) -> Iterator[Callable[[Sequence[Side], float], None]]:
    """A callable that shows the sides: a live table on a terminal, else a line a round."""
    from rich.console import Console

    console = Console(file=sys.stdout)
    if not console.is_terminal:
        yield _lines()
        return
    from rich.live import Live

    with Live(console=console, refresh_per_second=4) as live:
        yield lambda sides, seconds: live.update(table(what, sides, seconds))


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Shows meanwhile that something goes on, and for how long: moving on a terminal, else a line now and then."""
    from rich.console import Console

    console, over, started_s = Console(file=sys.stdout), threading.Event(), time.monotonic()

    def told() -> str:
        return f"{what}, {time.monotonic() - started_s:.0f} s"

    def look() -> None:
        if not console.is_terminal:
            while not over.wait(_SAY_S):
                console.print(told())
            return
        with console.status(told()) as status:
            while not over.wait(0.5):
                status.update(told())

    shows = threading.Thread(target=look, daemon=True)
    shows.start()
    try:
        yield
    finally:
        over.set()
        shows.join()


def table(what: str, sides: Sequence[Side], seconds: float) -> Table:
    """What both have done so far."""
    from rich.table import Table

    made = Table(title=f"{what}, {seconds:.0f} s", caption=f"{pages(sides)}\n{change(gain(sides))}")
    made.add_column("")
    for side in sides:
        made.add_column(NAMES[side.mode], justify="right")
    rows: dict[str, Callable[[Side], str]] = {
        "waiting": lambda side: str(side.waiting),
        "at engines": lambda side: str(side.running),
        "finished": lambda side: str(len(side.seen)),
        "mean JCT": lambda side: _seconds(side, np.mean),
        "P99 JCT": lambda side: _seconds(side, lambda jct: np.quantile(jct, 0.99)),
        "times cut": lambda side: str(side.cuts),
    }
    for name, of in rows.items():
        made.add_row(name, *(of(side) for side in sides))
    return made


def pages(sides: Sequence[Side]) -> str:
    """Where each side's admin page is."""
    return "admin pages  " + "  ".join(f"{side.mode}: http://127.0.0.1:{side.admin_port}/" for side in sides)


def change(found: Gain) -> str:
    """The gain so far, in a line."""
    if found.rounds == 0:
        return "the gain is told once both have served the same burst"
    told = f"ISRTF against FCFS, round by round: mean JCT {_percent(found.mean)}"
    if not math.isinf(found.high):
        told += f" (95 %: {_percent(found.low)} to {_percent(found.high)})"
    return f"{told}, P99 {_percent(found.p99)}, {found.rounds} round{'s' if found.rounds > 1 else ''}"


def decision(what: str, found: Gain) -> str:
    """What it comes to."""
    if found.is_significant:
        word = "Shortest predicted first was faster here."
    elif found.low > 0:
        word = "Shortest predicted first was slower here."
    else:
        word = "This run does not tell: the interval holds 0. Run it again while nothing else needs the CPU."
    return f"{word}\n{change(found)}; {what}; every burst went through both in turns."


def _lines() -> Callable[[Sequence[Side], float], None]:
    told = 0
    begun = False

    def look(sides: Sequence[Side], seconds: float) -> None:
        nonlocal told, begun
        if not begun:
            begun = True
            sys.stdout.write(f"{pages(sides)}\n")
        found = gain(sides)
        if found.rounds > told:
            told = found.rounds
            sys.stdout.write(f"{seconds:5.0f} s  {change(found)}\n")
            sys.stdout.flush()

    return look


def _seconds(side: Side, of: Callable[[np.ndarray], float]) -> str:
    seen = side.seen
    return f"{float(of(seen)):.2f} s" if len(seen) else "-"


def _percent(share: float) -> str:
    return f"{100 * share:+.0f} %"
