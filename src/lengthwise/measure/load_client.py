"""Prompts of wanted lengths, no two alike, nor like those of another run: a server's prefix cache flatters nobody."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import platform
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.backend.openai import Client, Prompt
from lengthwise.backend.openai_protocol import Piece, RequestError, Usage
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import IDLE_SHARE, Status
from lengthwise.schema.workload import Workload

Ints = npt.NDArray[np.int64]

_TEXT = """
    time year people way day man thing woman life child world school state family student group country
    problem hand part place case week company system program question work night point home water room
    mother area money story fact month lot right study book eye job word business issue side kind head
    house service friend father power hour game line end member law car city name team minute idea body
"""
WORDS = tuple(_TEXT.split())
_ANCHOR = "the"
_SAFE_IDS = np.arange(300, 1000)
"""Where no tokenizer can be asked: past the bytes and special tokens that begin usual vocabularies."""

_THRESHOLD = 16


@dataclass(frozen=True)
class Prompts:
    """Makes the prompt of each request, from a seed and a salt.

    Attributes:
        how: "token ids", "words" or "texts": what they are made of.
        lengths: [n] wanted tokens.
        salt: Of one run: prompts of another salt share nothing with these, whatever the seed.
        ids: Token ids to draw from, where the server takes them.
        words: Words to draw from otherwise, of one token each where that could be found out.
        overhead: Tokens that the server adds to the words: a first token, a chat's template.
        texts: The workload's own.
        shared: Share of each prompt that all have in common, from its beginning.
    """

    how: str
    lengths: Ints
    seed: int = 0
    salt: int = 0
    ids: Ints | None = None
    words: tuple[str, ...] = ()
    overhead: int = 0
    texts: Sequence[str] = ()
    shared: float = 0.0
    warnings: tuple[str, ...] = ()

    def __call__(self, row: int, round_: int = 0) -> Prompt:
        """The prompt of a request; another ``round_`` gives one of the same length that shares nothing more."""
        if self.how == "texts":
            return self.texts[row]
        length = int(self.lengths[row]) - self.overhead
        if self.ids is not None:
            return [int(i) for i in self.ids[self._drawn(row, round_, length, len(self.ids))]]
        picked = self._drawn(row, round_, max(0, length), len(self.words))
        return " ".join([_ANCHOR, *(self.words[i] for i in picked)])

    def _drawn(self, row: int, round_: int, length: int, of: int) -> Ints:
        common = int(length * self.shared)
        head = np.random.default_rng([self.seed, self.salt, 1]).integers(of, size=common)
        own = np.random.default_rng([self.seed, self.salt, 2, round_, row]).integers(of, size=length - common)
        return np.concatenate([head, own])


async def prompts_of(client: Client, workload: Workload, *, seed: int, salt: int, shared: float) -> Prompts:
    """How prompts are best made for a server that was probed.

    The workload's own texts where it has them; token ids where the server takes them; else words that are
    one token each, found by asking the server how many tokens it counts.

    Raises:
        InputError: ``shared`` is not from 0 to 1.
    """
    if not 0 <= shared <= 1:
        raise InputError(f"the shared prefix must be a share from 0 to 1; it is {shared}")
    lengths = workload.prompt_tokens
    if "prompt" in workload.extra:
        texts = [str(text) for text in workload.extra["prompt"]]
        return Prompts("texts", lengths, texts=texts)
    if client.capabilities.token_ids:
        ids = await client.tokenize(" ".join(WORDS))
        known = np.asarray(np.unique(ids) if ids else _SAFE_IDS)
        return Prompts("token ids", lengths, seed, salt, ids=known, shared=shared)
    if not client.capabilities.usage:
        doubt = "the server does not tell how long prompts are: they are as many words as tokens were wanted"
        return Prompts("words", lengths, seed, salt, words=WORDS, shared=shared, warnings=(doubt,))
    overhead = await _counted(client, [])
    words, warnings = await _worded(client, overhead)
    return Prompts("words", lengths, seed, salt, words=words, overhead=overhead, shared=shared, warnings=warnings)


async def _worded(client: Client, overhead: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Words of one token each for this server, and a doubt where there are few."""
    words = await _single(client, WORDS, overhead)
    if len(words) >= _THRESHOLD:
        return tuple(words), ()
    return WORDS, ("few words are one token each for this server: prompts are longer than wanted",)


async def _single(client: Client, words: Sequence[str], overhead: int) -> list[str]:
    """Those of the words that add one token each, found by halving."""
    added = await _counted(client, words) - overhead
    if added == len(words):
        return list(words)
    if len(words) == 1:
        return []
    middle = len(words) // 2
    return [w for half in (words[:middle], words[middle:]) for w in await _single(client, half, overhead)]


async def _counted(client: Client, words: Sequence[str]) -> int:
    """Prompt tokens that the server counts for the anchor and these words."""
    body = client.body(" ".join([_ANCHOR, *words]), 1)
    try:
        usages = [piece.usage async for piece in client.stream(body) if piece.usage is not None]
    except RequestError as error:
        raise InputError(f"{client.server.shown} failed while prompts were being measured: {error}") from error
    return usages[-1].prompt_tokens if usages else 0


LIED = "lied usage"
EMPTY = "empty answer"
_TIMED_OUT = frozenset({"timed out", "stalled"})
LOST = frozenset({"refused", "reset", "closed early", "no connection", *_TIMED_OUT})
"""Failures of a server that is not there any more."""


@dataclass(slots=True)
class Row:
    """Times are on the clock of ``time.perf_counter``.

    Attributes:
        deadline_s: When it was to be sent.
        wanted_tokens: Output tokens asked for.
        sent_s: When its headers went out; None before.
        finished: Whether the answer is over, well or not; False where the run's end cut it off.
        failure: Of what it failed.
    """

    deadline_s: float
    wanted_tokens: int
    ids: int = 0
    sent_s: float | None = None
    at_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    texts: int = 0
    usage: Usage | None = None
    finish_reason: str | None = None
    finished: bool = False
    failure: RequestError | None = None

    def sent(self, at_s: float) -> None:
        """Told when the headers went out."""
        self.sent_s = at_s

    def take(self, piece: Piece) -> None:
        """Adds a piece of the answer."""
        if piece.is_output:
            self.at_s.append(piece.at_s)
            self.tokens.append(piece.tokens)
            self.texts += bool(piece.text)
        if piece.usage is not None:
            self.usage = piece.usage
        if piece.finish_reason is not None:
            self.finish_reason = piece.finish_reason

    @property
    def status(self) -> Status:
        """The bucket: what a server refuses is rejected, what it is too slow for has timed out."""
        if self.failure is None:
            return Status.FINISHED if self.finished and self.at_s else Status.UNFINISHED
        if self.failure.reason.startswith("http "):
            return Status.REJECTED
        return Status.TIMED_OUT if self.failure.reason in _TIMED_OUT else Status.UNFINISHED

    @property
    def output_tokens(self) -> int:
        """By usage, else by tokens that were told; as many as pieces (at least) where neither can be believed."""
        if self.usage is not None and self._complete and not self.lied_of_output:
            return self.usage.output_tokens
        return sum(self.counts) or len(self.at_s)

    @property
    def counts(self) -> list[int]:
        """Tokens of each piece, 0 where nobody told; where only the sum is told and they are as many, one each."""
        if self.lied_of_output:
            return [0] * len(self.tokens)
        even = self.usage is not None and self.usage.output_tokens == len(self.at_s) and not any(self.tokens)
        return [1] * len(self.tokens) if even else self.tokens

    @property
    def lied_of_output(self) -> bool:
        """Whether the number of output tokens cannot be true: above what was asked for, or below what came."""
        if self.usage is None or not self._complete:
            return False
        told, said = sum(self.tokens), self.usage.output_tokens
        cut = self.finish_reason == "length" and said < self.wanted_tokens
        return said > self.wanted_tokens or said < self.texts or (0 < told != said) or cut

    @property
    def lied_of_prompt(self) -> bool:
        """Whether the number of prompt tokens is another than of the token ids that were sent."""
        return self.usage is not None and self.ids > 0 and self.usage.prompt_tokens not in {self.ids, 0}

    @property
    def _complete(self) -> bool:
        return self.finished and self.failure is None

    @property
    def reason(self) -> str:
        """What it failed of; "" where it did not."""
        if self.failure is not None:
            return self.failure.reason
        if self.finished and not self.at_s:
            return EMPTY
        return LIED if self.lied_of_output or self.lied_of_prompt else ""


_AHEAD_BYTES = 1 << 28
_WARM_AT_ONCE = 4


@dataclass
class Run:
    """One run of a workload against a server.

    Attributes:
        give_up_after: So many requests lost in a row, or failed where none ever succeeded, end the run.
        report: Called with the requests that ended so far.
        rows: By request; those that were never due yet are None.
        start_s: When the first was due at the earliest (``perf_counter``).
        why_ended: Empty where all requests ended by themselves.
    """

    client: Client
    workload: Workload
    prompts: Prompts
    exact: bool = True
    priorities: bool = False
    give_up_after: int = 10
    report: Callable[[int], None] = lambda _: None
    rows: list[Row | None] = field(default_factory=list)
    start_s: float = 0.0
    why_ended: str = ""
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _bodies: dict[int, bytes] = field(default_factory=dict)
    _finished: int = 0
    _succeeded: int = 0
    _in_a_row: int = 0

    def __post_init__(self) -> None:
        self.rows = [None] * len(self.workload)

    def stop(self, cause: str) -> None:
        """Ends the run now; the first reason stays."""
        self.why_ended = self.why_ended or cause
        self._stop.set()

    async def warm_up(self, requests: int) -> None:
        """So many requests like the first ones, with prompts of their own, that nobody counts."""
        gate = asyncio.Semaphore(_WARM_AT_ONCE)

        async def one(at: int) -> None:
            body = self._made(at % len(self.workload), round_=1 + at // len(self.workload))
            async with gate:
                with contextlib.suppress(RequestError):
                    async for _ in self.client.stream(body):
                        pass

        await self._until_stopped(asyncio.gather(*(one(i) for i in range(requests))), None)

    def prepare(self) -> None:
        """Makes the bodies of the first requests, so that none is late for it."""
        size = 0
        for row in range(len(self.workload)):
            self._bodies[row] = self._made(row)
            size += len(self._bodies[row])
            if size > _AHEAD_BYTES:
                return

    async def go(self, time_limit_s: float | None) -> None:
        """Runs all requests, or as many as come before the limit or a stop."""
        self.start_s = time.perf_counter()
        n = self.workload.concurrency
        main = self._open() if n is None else self._closed(n)
        if not await self._until_stopped(asyncio.ensure_future(main), time_limit_s):
            self.stop(f"the time limit of {time_limit_s:g} s" if time_limit_s is not None else "")

    async def _until_stopped(self, main: asyncio.Future[Any], limit_s: float | None) -> bool:
        """Whether it ended by itself or was told to stop; False where the limit came first."""
        stopper = asyncio.ensure_future(self._stop.wait())
        done, left = await asyncio.wait({main, stopper}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        if main in done:
            main.result()
        return bool(done)

    async def _open(self) -> None:
        async with asyncio.TaskGroup() as group:
            for row, arrival_s in enumerate(self.workload.arrival_s.tolist()):
                deadline_s = self.start_s + arrival_s
                if row not in self._bodies:
                    self._bodies[row] = self._made(row)
                if (wait_s := deadline_s - time.perf_counter()) > 0:
                    await asyncio.sleep(wait_s)
                elif row % 8 == 0:  # those that were started must come to be sent
                    await asyncio.sleep(0)
                group.create_task(self._one(row, deadline_s))

    async def _closed(self, concurrency: int) -> None:
        left = iter(range(len(self.workload)))

        async def worker() -> None:
            deadline_s = self.start_s
            for row in left:
                await self._one(row, deadline_s)
                deadline_s = time.perf_counter()

        workers: list[Coroutine[Any, Any, None]] = [worker() for _ in range(min(concurrency, len(self.workload)))]
        async with asyncio.TaskGroup() as group:
            for one in workers:
                group.create_task(one)

    async def _one(self, at: int, deadline_s: float) -> None:
        row = self.rows[at] = Row(deadline_s, int(self.workload.output_tokens[at]))
        if self.prompts.how == "token ids":
            row.ids = int(self.workload.prompt_tokens[at])
        body = self._bodies.pop(at, None) or self._made(at)
        try:
            async with contextlib.aclosing(self.client.stream(body, sent=row.sent)) as pieces:
                async for piece in pieces:
                    row.take(piece)
        except RequestError as error:
            row.failure = error
        row.finished = True
        self._count(row)

    def _count(self, row: Row) -> None:
        self._finished += 1
        self.report(self._finished)
        failure = row.failure
        if failure is None:
            self._succeeded, self._in_a_row = self._succeeded + 1, 0
        elif failure.reason in LOST or not self._succeeded:
            self._in_a_row += 1
            if self._in_a_row >= self.give_up_after:
                self.stop(f"{self._in_a_row} failures in a row, the last: {failure}")
        else:
            self._in_a_row = 0

    def _made(self, at: int, round_: int = 0) -> bytes:
        priority = self.workload.priority
        return self.client.body(
            self.prompts(at, round_),
            int(self.workload.output_tokens[at]),
            exact=self.exact,
            priority=int(priority[at]) if self.priorities and priority is not None else None,
        )


Floats = npt.NDArray[np.float64]

SHARE, CHANCE = 0.01, 0.05
LEAST_P99 = math.ceil(math.log(CHANCE) / math.log(1 - SHARE))
"""299: of fewer values, not even the largest is surely (95 %) beyond the 99th percentile of where they come from."""

LEAST = 2
"""One case of few requests is chance, however unlikely."""


def beyond(values: Sequence[float] | Floats, limit: float) -> dict[str, Any]:
    """How many values are above a limit, of how many, their share, and whether that is surely above 1 %.

    Surely: it is two or more, and were 1 % the truth, as many or more would come by chance in less than 5 %
    of such runs (binomial): 2 of 30, 3 of 60, 4 of 100, 16 of 1,000.
    """
    count, of = int((np.asarray(values, np.float64) > limit).sum()), len(values)
    return {
        "limit_s": limit if math.isfinite(limit) else None,
        "count": count,
        "of": of,
        "share": count / of if of else 0.0,
        "surely_often": count >= LEAST and at_least(count, of, SHARE) < CHANCE,
    }


def at_least(count: int, of: int, share: float) -> float:
    """The chance of so many cases or more, were each of them to come with this share (the binomial tail)."""
    if count <= share * of:
        return 1.0
    fewer = sum(
        math.exp(
            math.lgamma(of + 1)
            - math.lgamma(k + 1)
            - math.lgamma(of - k + 1)
            + k * math.log(share)
            + (of - k) * math.log1p(-share)
        )
        for k in range(count)
    )
    return max(0.0, 1.0 - fewer)


_TICK_S = 0.02
_LATE_S, _LATE_SHARE, _LEAST_LATE_S = 0.010, 0.05, 0.001
"""Late is who left more than 10 ms, or 5 % of a median TTFT, after it was due; nobody is within 1 ms, as no loop wakes
more exactly."""

_LAG_SHARE = 0.5
"""A loop that wakes later than so much of a median TTFT reads many tokens at once."""

_BUSY = 0.8
_READINGS = 5
_SKEW_S, _SKEW_SHARE = 0.05, 2e-4


class Monitor:
    """Runs beside the requests; ``metadata`` and ``warnings`` tell what it saw."""

    def __init__(self) -> None:
        self.start = datetime.now(UTC)
        self.start_s, self._cpu_s, self._apart_s = time.perf_counter(), time.process_time(), _clocks_apart_s()
        self.lags: list[float] = []
        self.metadata: dict[str, Any] = {}

    async def run(self) -> None:
        """Measures for ever how late the event loop wakes."""
        while True:
            deadline_s = time.perf_counter() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self.lags.append(max(0.0, time.perf_counter() - deadline_s))

    def close(self, late_s: Sequence[float] | Floats, median_ttft_s: float = math.inf) -> None:
        """Ends the measurement; ``late_s`` is how late each request left after it was due."""
        span_s = max(time.perf_counter() - self.start_s, 1e-9)
        self.metadata = {
            "late_s": _quantiles(late_s),
            "late": beyond(late_s, min(_LATE_S, max(_LEAST_LATE_S, _LATE_SHARE * median_ttft_s))),
            "loop_lag_s": _quantiles(self.lags),
            "loop_lag": beyond(self.lags, max(_LATE_S, _LAG_SHARE * median_ttft_s)),
            "cpu_share": (time.process_time() - self._cpu_s) / span_s,
            "clock_skew_s": _clocks_apart_s() - self._apart_s,
            "span_s": span_s,
            "median_ttft_s": median_ttft_s if math.isfinite(median_ttft_s) else None,
        }
        self.metadata["late_doubt"] = self._late_doubt()  # which of the doubts a calibration may weigh

    def warnings(self) -> list[str]:
        """What of it limits the trust in latencies."""
        return [*self._lateness(), *self._business(), *self._clocks()]

    def _late_doubt(self) -> str | None:
        late, share = self.metadata["late"], self.metadata["cpu_share"]
        if not late["surely_often"]:
            return None
        why = (
            ""
            if share > IDLE_SHARE
            else f"; it had {100 * share:.0f} % of a core: other work on its machine held it up, or it was blocked"
        )
        return (
            f"the client sent {late['count']:,} of {late['of']:,} requests ({100 * late['share']:.1f} %) more than "
            f"{1e3 * late['limit_s']:.1f} ms after they were due (the worst "
            f"{1e3 * self.metadata['late_s']['max']:.1f} ms{self._ttft()}); latencies, counted from when they were due, "
            f"hold it{why}"
        )

    def _ttft(self) -> str:
        ttft_s = self.metadata["median_ttft_s"]
        return "" if ttft_s is None else f"; median TTFT {1e3 * ttft_s:.1f} ms"

    def _lateness(self) -> Iterator[str]:
        if self.metadata["late_doubt"] is not None:
            yield self.metadata["late_doubt"]
        lag, ttft = self.metadata["loop_lag"], self._ttft()
        if lag["surely_often"]:
            yield (
                f"the client woke more than {1e3 * lag['limit_s']:.0f} ms late in {lag['count']:,} of {lag['of']:,} "
                f"looks (the worst {1e3 * self.metadata['loop_lag_s']['max']:.0f} ms{ttft}): tokens may have waited to be "
                "read, so that TTFT is too long and the times between tokens are too short"
            )

    def _business(self) -> Iterator[str]:
        share = self.metadata["cpu_share"]
        if share > _BUSY:
            yield (
                f"the client kept {100 * share:.0f} % of a core busy: it may itself be what was measured; "
                "lower the load, or use a machine of its own"
            )

    def _clocks(self) -> Iterator[str]:
        skew, span_s = abs(self.metadata["clock_skew_s"]), self.metadata["span_s"]
        if skew > _SKEW_S + _SKEW_SHARE * span_s:
            yield (
                f"the wall clock moved by {skew:.2f} s against the monotonic one during the run; times are of the "
                "monotonic one, but logs of others that tell wall times will not fit"
            )


def _clocks_apart_s() -> float:
    """The wall clock less the monotonic one; of several readings the one that was interrupted least."""
    readings = []
    for _ in range(_READINGS):
        before_s, wall_s, after_s = time.perf_counter(), time.time(), time.perf_counter()
        readings.append((after_s - before_s, wall_s - (before_s + after_s) / 2))
    return min(readings)[1]


def machine() -> dict[str, Any]:
    """The machine that the client runs on."""
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
    }


def _quantiles(values: Sequence[float] | Floats) -> dict[str, float | None]:
    """Median, 99th percentile (None below so many that one of them alone would be it) and largest."""
    if not len(values):
        return {"p50": 0.0, "p99": None, "max": 0.0}
    p50, p99, top = np.quantile(np.asarray(values), [0.5, 0.99, 1.0])
    return {"p50": float(p50), "p99": float(p99) if len(values) >= LEAST_P99 else None, "max": float(top)}
