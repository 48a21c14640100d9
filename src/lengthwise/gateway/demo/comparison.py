"""Send the same bursts through an FCFS and an ISRTF gateway in turns, and compare the JCT that clients see."""

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

from lengthwise.gateway.background import background
from lengthwise.gateway.config import Engine, GatewayConfig, Listen, Order, PredictionConfig
from lengthwise.gateway.demo.engines import MAX_NUM_SEQS, MODEL, Engines
from lengthwise.predict.contract import Prompts
from lengthwise.predict.distribution import LengthDistribution
from lengthwise.statistics import Floats, t_half_width

if TYPE_CHECKING:
    from rich.table import Table

    from lengthwise.gateway.serve import Gateway


MAX_TOKENS = 1024
LOAD = 3.0  # arrival rate in a burst relative to the engines' capacity, as in ELIS
_GAMMA_SHAPE = 0.73
_SIGMA = 0.5  # standard deviation of the log length around the median of its kind, as no prompt determines its length
KINDS = (  # (question, median tokens of its answers)
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
    """A request of a burst."""

    arrival_s: float  # time after the start of the burst
    prompt: str
    tokens: int  # output length, which the gateway does not see


def burst(seed: int, number: int, count: int, *, tokens_per_s: float, shrink: float) -> list[Question]:
    """Return the ``count`` requests of burst ``number``. Equal seeds and numbers give equal bursts.

    They arrive at LOAD times the rate that engines with ``tokens_per_s`` can serve. Lengths are divided by ``shrink``.
    """
    rng = np.random.default_rng([seed, number])
    kinds = rng.integers(len(KINDS), size=count)
    medians = np.array([KINDS[kind][1] for kind in kinds], float)
    lengths = np.clip(medians * np.exp(_SIGMA * rng.standard_normal(count)) / shrink, 1, MAX_TOKENS)
    gap_s = lengths.mean() / tokens_per_s / LOAD
    arrival_s = np.cumsum(rng.gamma(_GAMMA_SHAPE, gap_s / _GAMMA_SHAPE, count))
    places = rng.integers(len(PLACES), size=count)
    return [
        Question(float(at_s), KINDS[kind][0].format(PLACES[place]), round(float(length)))
        for at_s, kind, place, length in zip(arrival_s, kinds, places, lengths, strict=True)
    ]


def body(model: str, question: Question) -> dict[str, Any]:
    """Return the body of a request, with its output length in a field that only the engine reads."""
    return {
        "model": model,
        "prompt": question.prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "vllm_xargs": {"output_tokens": question.tokens, "max_tokens": MAX_TOKENS},
    }


MODES = ("fcfs", "isrtf")
REQUESTS = 48
WARM_UP_ROUND = 1 << 20  # number of the burst whose times are discarded
_POLL_INTERVAL_S = 0.25
_LEVEL = 0.95


@dataclass
class Side:
    """The measurements of one of the two gateways."""

    mode: str
    port: int = 0
    admin_port: int | None = None
    rounds: list[Floats] = field(default_factory=list)  # JCT in each finished round
    jct_s: list[float] = field(default_factory=list)  # JCT of finished requests in the current round
    waiting: int = 0
    running: int = 0
    preemptions: int = 0

    @property
    def all_jct_s(self) -> Floats:
        """JCT of all finished requests in all rounds, as an array [n]."""
        return np.concatenate([*self.rounds, np.array(self.jct_s, float)])


@dataclass(frozen=True)
class Gain:
    """Relative changes of the mean and 99th percentile of JCT. The mean's 95 % interval is ``low`` to ``high``."""

    mean: float
    low: float
    high: float
    p99: float
    rounds: int

    @property
    def is_significant(self) -> bool:
        """Whether the second side is significantly faster: the complete interval is below 0."""
        return self.high < 0


def gain(sides: Sequence[Side]) -> Gain:
    """Return the change from the first side to the second, with a Student t interval over the rounds of both."""
    first, second = (side.rounds for side in sides)
    rounds = min(len(first), len(second))
    if rounds == 0:
        return Gain(math.nan, math.nan, math.nan, math.nan, 0)
    logs = np.log([float(b.mean() / a.mean()) for a, b in zip(first, second, strict=False)])
    half = float(t_half_width(logs, _LEVEL)) if rounds > 1 else math.inf
    center = float(logs.mean())
    mean, low, high = (math.exp(log) - 1 for log in (center, center - half, center + half))
    p99 = [float(np.quantile(np.concatenate(side[:rounds]), 0.99)) for side in (first, second)]
    return Gain(mean, low, high, p99[1] / p99[0] - 1, rounds)


class ScaledPredictor:
    """The built-in predictor, with its lengths divided by ``shrink``."""

    predicts_once = True

    def __init__(self, shrink: float) -> None:
        from lengthwise.predict import default

        self._inner, self._shrink = default(), shrink

    def predict(self, prompts: Prompts, tokens_so_far: Any = 0) -> LengthDistribution:
        """Return distributions of total output lengths."""
        del tokens_so_far
        return LengthDistribution.of(np.maximum(1.0, self._inner.predict(prompts).tokens / self._shrink))


async def race(
    engines: Engines,
    ports: Sequence[tuple[int, int]],
    *,
    seconds: float,
    seed: int,
    requests: int = REQUESTS,
    show: Callable[[Sequence[Side], float], None] = lambda *_: None,
) -> tuple[Side, ...]:
    """Run rounds of ``requests`` requests, of which the sides take turns to start first, and return both sides.

    ``ports`` has a pair (port, admin port) for each gateway. After two rounds, no round starts after ``seconds``.
    ``show`` is called repeatedly with the sides and the seconds so far.
    """
    loop = asyncio.get_running_loop()
    make_burst = partial(burst, seed, tokens_per_s=engines.tokens_per_s, shrink=engines.shrink)
    sides = tuple(Side(mode) for mode in MODES)

    def poll() -> None:
        for side, gateway in zip(sides, gateways, strict=True):
            now = gateway.driver.statistics()
            side.waiting, side.running, side.preemptions = now.waiting, now.running, now.preemptions
        show(sides, loop.time() - started_s)

    async def poll_repeatedly() -> None:
        while True:
            poll()
            await asyncio.sleep(_POLL_INTERVAL_S)

    async with AsyncExitStack() as stack:
        gateways = [
            await stack.enter_async_context(_gateway(engines, side.mode, pair))
            for side, pair in zip(sides, ports, strict=True)
        ]
        for side, gateway in zip(sides, gateways, strict=True):
            side.port, side.admin_port = gateway.port, gateway.admin_port
            await gateway.fleet.wait_checked(30.0)
            await _round(gateway, Side(side.mode), make_burst(WARM_UP_ROUND, 8))
        started_s = loop.time()
        stack.callback(poll)
        await stack.enter_async_context(background(poll_repeatedly()))
        number = 0
        while number < 2 or loop.time() - started_s < seconds:
            questions = make_burst(number, requests)
            for k in (0, 1) if number % 2 == 0 else (1, 0):
                await _round(gateways[k], sides[k], questions)
            number += 1
    return sides


def _gateway(engines: Engines, mode: str, ports: tuple[int, int]) -> Gateway:
    from lengthwise.gateway.length_prediction import LengthPredictor
    from lengthwise.gateway.serve import Gateway

    config = GatewayConfig(
        engines=tuple(
            Engine(url, name=f"engine {k + 1}", concurrency=MAX_NUM_SEQS, generation_defaults="none")
            for k, url in enumerate(engines.urls)
        ),
        order=Order(mode),
        prediction=PredictionConfig(learn=False),
        listen=Listen(port=ports[0], admin_port=ports[1]),
    )
    predictor = ScaledPredictor(engines.shrink)
    return Gateway(config, make_predictor=lambda *args: LengthPredictor(*args, predictor=predictor, place="inline"))


async def _round(gateway: Gateway, side: Side, questions: Sequence[Question]) -> None:
    import aiohttp

    loop = asyncio.get_running_loop()
    started_s = loop.time() + 0.05
    url = f"http://127.0.0.1:{gateway.port}/v1/completions"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def send(question: Question) -> None:
            await asyncio.sleep(started_s + question.arrival_s - loop.time())
            async with session.post(url, json=body(MODEL, question)) as response:
                data = await response.read()
                if response.status != 200 or not data.endswith(b"data: [DONE]\n\n"):
                    raise RuntimeError(f"a response of the demo failed: {response.status} {data[-300:]!r}")
            side.jct_s.append(loop.time() - started_s - question.arrival_s)

        await asyncio.gather(*(send(question) for question in questions))
    side.rounds.append(np.array(side.jct_s))
    side.jct_s = []


PROGRESS_INTERVAL_S = 15.0
NAMES = {"fcfs": "first come, first served", "isrtf": "shortest predicted first (ISRTF)"}


@contextmanager
def live_table(title: str) -> Iterator[Callable[[Sequence[Side], float], None]]:
    """Yield a function that shows the sides: as a live table on a terminal, otherwise as a line per round."""
    from rich.console import Console

    console = Console(file=sys.stdout)
    if not console.is_terminal:
        num_shown = -1

        def show(sides: Sequence[Side], seconds: float) -> None:
            nonlocal num_shown
            found = gain(sides)
            if num_shown < 0:
                sys.stdout.write(f"{_admin_pages(sides)}\n")
            if found.rounds > max(num_shown, 0):
                sys.stdout.write(f"{seconds:5.0f} s  {change(found)}\n")
                sys.stdout.flush()
            num_shown = found.rounds

        yield show
        return
    from rich.live import Live

    with Live(console=console, refresh_per_second=4) as live:
        yield lambda sides, seconds: live.update(table(title, sides, seconds))


@contextmanager
def progress(text: str) -> Iterator[None]:
    """Show a text with the seconds so far: continuously on a terminal, otherwise as a line every 15 s."""
    from rich.console import Console

    console, done, started_s = Console(file=sys.stdout), threading.Event(), time.monotonic()

    def show() -> None:
        if not console.is_terminal:
            while not done.wait(PROGRESS_INTERVAL_S):
                console.print(f"{text}, {time.monotonic() - started_s:.0f} s")
            return
        with console.status(f"{text}, 0 s") as status:
            while not done.wait(0.5):
                status.update(f"{text}, {time.monotonic() - started_s:.0f} s")

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def table(title: str, sides: Sequence[Side], seconds: float) -> Table:
    """Return a table of both sides."""
    from rich.table import Table

    shown = Table(title=f"{title}, {seconds:.0f} s", caption=f"{_admin_pages(sides)}\n{change(gain(sides))}")
    shown.add_column("")
    for side in sides:
        shown.add_column(NAMES[side.mode], justify="right")
    times = [side.all_jct_s for side in sides]
    shown.add_row("waiting", *(str(side.waiting) for side in sides))
    shown.add_row("at engines", *(str(side.running) for side in sides))
    shown.add_row("finished", *(str(len(jct_s)) for jct_s in times))
    shown.add_row("mean JCT", *(f"{jct_s.mean():.2f} s" if len(jct_s) else "-" for jct_s in times))
    shown.add_row("P99 JCT", *(f"{np.quantile(jct_s, 0.99):.2f} s" if len(jct_s) else "-" for jct_s in times))
    shown.add_row("preemptions", *(str(side.preemptions) for side in sides))
    return shown


def _admin_pages(sides: Sequence[Side]) -> str:
    return "admin pages  " + "  ".join(f"{side.mode}: http://127.0.0.1:{side.admin_port}/" for side in sides)


def change(found: Gain) -> str:
    """Return the gain so far as a line of text."""
    if found.rounds == 0:
        return "the gain is shown once both have served the same burst"
    text = f"ISRTF against FCFS, round by round: mean JCT {_percent(found.mean)}"
    if not math.isinf(found.high):
        text += f" (95 %: {_percent(found.low)} to {_percent(found.high)})"
    return f"{text}, P99 {_percent(found.p99)}, {found.rounds} round{'s' if found.rounds > 1 else ''}"


def decision(engines: str, found: Gain) -> str:
    """Return the conclusion of the demo as text."""
    verdict = f"Shortest predicted first was {'faster' if found.is_significant else 'slower'}."
    if not found.is_significant and not found.low > 0:
        verdict = "Not significant: the interval contains 0. Run it again while nothing else uses the CPU."
    return f"{verdict}\n{change(found)}; {engines}; every burst went through both in turns."


def _percent(share: float) -> str:
    return f"{100 * share:+.0f} %"
