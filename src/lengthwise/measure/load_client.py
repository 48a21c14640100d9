"""Client of the load generator: makes prompts, sends requests when they are due, and monitors its own delays."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np

from lengthwise.backend.openai import Client, Prompt
from lengthwise.backend.openai_protocol import Chunk, RequestError, Usage
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import MAX_CLIENT_CPU_SHARE, Floats, Ints, Status
from lengthwise.schema.workload import UNCAPPED, SharedPrefixes, Workload

_TEXT = """
    time year people way day man thing woman life child world school state family student group country
    problem hand part place case week company system program question work night point home water room
    mother area money story fact month lot right study book eye job word business issue side kind head
    house service friend father power hour game line end member law car city name team minute idea body
"""
WORDS = tuple(_TEXT.split())
_ANCHOR = "the"
_SAFE_IDS = np.arange(300, 1000)  # past the bytes and special tokens at the start of typical vocabularies
_MIN_WORDS = 16


@dataclass(frozen=True)
class Prompts:
    """Makes the prompt of each request. Only ``prefixes`` and ``shared`` give prompts common tokens."""

    how: str  # "token ids", "words" or "texts"
    lengths: Ints  # [n] requested tokens
    seed: int = 0
    salt: int = 0  # prompts of different salts share nothing, whatever the seed
    ids: Ints | None = None  # token ids to draw from, if the server accepts them
    words: tuple[str, ...] = ()  # words to draw from otherwise; one token each if known
    overhead: int = 0  # tokens that the server adds to each prompt, such as a first token or a chat template
    texts: Sequence[str] = ()  # the workload's own
    shared: float = 0.0  # share of each prompt's tokens, from its start, that all prompts have in common
    prefixes: SharedPrefixes | None = None  # blocks of equal numbers have equal tokens; later turns have no blocks
    warnings: tuple[str, ...] = ()

    def __call__(self, row: int, round_: int = 0) -> Prompt:
        """Return the prompt of a request. Another ``round_`` gives a different prompt of the same length."""
        if self.how == "texts":
            return self.texts[row]
        length = int(self.lengths[row]) - self.overhead
        if self.ids is not None:
            return [int(i) for i in self.ids[self._draw(row, round_, length, len(self.ids))]]
        return " ".join([_ANCHOR, *(self.words[i] for i in self._draw(row, round_, max(0, length), len(self.words)))])

    def _draw(self, row: int, round_: int, length: int, of: int) -> Ints:
        common = int(length * self.shared)
        head = np.random.default_rng([self.seed, self.salt, 1]).integers(of, size=common)
        parts = [head]
        if (prefixes := self.prefixes) is not None:
            for block in prefixes.block_ids[prefixes.start[row] : prefixes.start[row + 1]].tolist():
                rng = np.random.default_rng([self.seed, self.salt, 3, round_, block])
                parts.append(rng.integers(of, size=prefixes.block_tokens))
        first = np.concatenate(parts)[:length]
        own = np.random.default_rng([self.seed, self.salt, 2, round_, row]).integers(of, size=length - len(first))
        return np.concatenate([first, own])


async def prompts_of(client: Client, workload: Workload, *, seed: int, salt: int, shared: float) -> Prompts:
    """Return a maker of prompts: the workload's texts, else token ids if the server accepts them, else words."""
    if not 0 <= shared <= 1:
        raise InputError(f"the shared prefix must be a share from 0 to 1; it is {shared}")
    lengths, prefixes = workload.prompt_tokens, None if shared else workload.prefixes
    made = partial(Prompts, lengths=lengths, seed=seed, salt=salt, shared=shared, prefixes=prefixes)
    if "prompt" in workload.extra:
        return Prompts("texts", lengths, texts=[str(text) for text in workload.extra["prompt"]])
    if client.capabilities.token_id_prompts:
        ids = await client.tokenize(" ".join(WORDS))
        return made("token ids", ids=np.unique(ids) if ids else _SAFE_IDS)
    if not client.capabilities.usage:
        warning = "the server does not report how long prompts are: they are as many words as tokens were requested"
        return made("words", words=WORDS, warnings=(warning,))
    overhead = await _count_tokens(client, [])
    words, warnings = tuple(await _single_token_words(client, WORDS, overhead)), tuple[str, ...]()
    if len(words) < _MIN_WORDS:
        words, warnings = WORDS, ("few words are one token each for this server: prompts are longer than requested",)
    return made("words", words=words, overhead=overhead, warnings=warnings)


async def _single_token_words(client: Client, words: Sequence[str], overhead: int) -> list[str]:
    added = await _count_tokens(client, words) - overhead
    if added == len(words):
        return list(words)
    if len(words) == 1:
        return []
    middle = len(words) // 2
    return [w for half in (words[:middle], words[middle:]) for w in await _single_token_words(client, half, overhead)]


async def _count_tokens(client: Client, words: Sequence[str]) -> int:
    body = client.body(" ".join([_ANCHOR, *words]), 1)
    try:
        counts = [chunk.usage.prompt_tokens async for chunk in client.stream(body) if chunk.usage is not None]
    except RequestError as error:
        raise InputError(f"{client.server.shown} failed while prompts were being measured: {error}") from error
    return counts[-1] if counts else 0


INVALID_USAGE = "wrong usage"
EMPTY = "empty answer"
_TIMED_OUT = frozenset({"timed out", "stalled"})
LOST = frozenset({"refused", "reset", "closed early", "no connection", *_TIMED_OUT})  # the server may be gone


@dataclass(slots=True)
class Row:
    """State and outcome of one request. Times are those of ``time.perf_counter``."""

    deadline_s: float  # when it was due
    requested_tokens: int
    ids: int = 0  # number of token ids sent; 0 for a prompt of text
    sent_s: float | None = None  # when its headers were sent; None before
    at_s: list[float] = field(default_factory=list)  # arrivals of chunks with output
    tokens: list[int] = field(default_factory=list)  # tokens of these chunks; 0: unknown
    texts: int = 0  # number of these chunks with text
    usage: Usage | None = None
    finish_reason: str | None = None
    finished: bool = False  # successfully or not; False if the run stopped before
    failure: RequestError | None = None

    def sent(self, at_s: float) -> None:
        """Record the time at which the request's headers were sent."""
        self.sent_s = at_s

    def add(self, chunk: Chunk) -> None:
        """Add a chunk of the response."""
        if chunk.is_output:
            self.at_s.append(chunk.at_s)
            self.tokens.append(chunk.tokens)
            self.texts += bool(chunk.text)
        self.usage = self.usage if chunk.usage is None else chunk.usage
        self.finish_reason = self.finish_reason if chunk.finish_reason is None else chunk.finish_reason

    @property
    def status(self) -> Status:
        """Status in records: an HTTP error counts as a rejection, a stall as a timeout."""
        if self.failure is None:
            return Status.FINISHED if self.finished and self.at_s else Status.UNFINISHED
        if self.failure.reason.startswith("http "):
            return Status.REJECTED
        return Status.TIMED_OUT if self.failure.reason in _TIMED_OUT else Status.UNFINISHED

    @property
    def output_tokens(self) -> int:
        """Output tokens by usage or, if it is missing or invalid, by the chunks' counts or the number of chunks."""
        if self._final_usage is not None and not self.invalid_output_usage:
            return self._final_usage.output_tokens
        return sum(self.counts) or len(self.at_s)

    @property
    def counts(self) -> list[int]:
        """Tokens of each chunk. Unknown counts are 0, or 1 if usage has as many tokens as there are chunks."""
        if self.invalid_output_usage:
            return [0] * len(self.tokens)
        even = self.usage is not None and self.usage.output_tokens == len(self.at_s) and not any(self.tokens)
        return [1] * len(self.tokens) if even else self.tokens

    @property
    def invalid_output_usage(self) -> bool:
        """Whether usage differs from the received tokens, exceeds the requested ones, or says "length" with fewer."""
        if self._final_usage is None:
            return False
        counted, reported = sum(self.tokens), self._final_usage.output_tokens
        cut = self.finish_reason == "length" and reported < self.requested_tokens < UNCAPPED
        return reported > self.requested_tokens or reported < self.texts or 0 < counted != reported or cut

    @property
    def invalid_prompt_usage(self) -> bool:
        """Whether usage reports a number of prompt tokens that differs from the token ids sent."""
        return self.usage is not None and self.ids > 0 and self.usage.prompt_tokens not in {self.ids, 0}

    @property
    def _final_usage(self) -> Usage | None:
        return self.usage if self.finished and self.failure is None else None

    @property
    def reason(self) -> str:
        """Reason of the failure, or "" if there was none."""
        if self.failure is not None:
            return self.failure.reason
        if self.finished and not self.at_s:
            return EMPTY
        return INVALID_USAGE if self.invalid_output_usage or self.invalid_prompt_usage else ""


_PREPARED_BYTES = 1 << 28
_WARMUP_CONCURRENCY = 4


@dataclass
class Run:
    """One run of a workload against a server."""

    client: Client
    workload: Workload
    prompts: Prompts
    exact: bool = True
    priorities: bool = False
    give_up_after: int = 10  # consecutive lost requests, or failures before any success, that stop the run
    report: Callable[[int], None] = lambda _: None  # called with the number of finished requests
    rows: list[Row | None] = field(default_factory=list)  # None: never due
    start_s: float = 0.0  # time zero of arrivals (``perf_counter``)
    stop_reason: str = ""  # empty if all requests finished by themselves
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _bodies: dict[int, bytes] = field(default_factory=dict)
    _finished: int = 0
    _succeeded: int = 0
    _consecutive_failures: int = 0

    def __post_init__(self) -> None:
        self.rows = [None] * len(self.workload)

    def stop(self, reason: str) -> None:
        """Stop the run now. If the run is stopped again, the first reason remains."""
        self.stop_reason = self.stop_reason or reason
        self._stop.set()

    async def warm_up(self, requests: int) -> None:
        """Send requests that do not count, with the lengths of the first requests but different prompts."""
        gate = asyncio.Semaphore(_WARMUP_CONCURRENCY)

        async def one(at: int) -> None:
            body = self._body(at % len(self.workload), round_=1 + at // len(self.workload))
            with contextlib.suppress(RequestError):
                async with gate:
                    async for _ in self.client.stream(body):
                        pass

        await self._until_stopped(asyncio.gather(*(one(i) for i in range(requests))), None)

    def prepare(self) -> None:
        """Create the bodies of the first requests in advance, so that creating them delays no request."""
        size = 0
        for row in range(len(self.workload)):
            self._bodies[row] = self._body(row)
            size += len(self._bodies[row])
            if size > _PREPARED_BYTES:
                return

    async def send_all(self, time_limit_s: float | None) -> None:
        """Send all requests, unless the time limit or a stop ends the run earlier."""
        self.start_s = time.perf_counter()
        concurrency = self.workload.concurrency
        main = self._open_loop() if concurrency is None else self._closed_loop(concurrency)
        if not await self._until_stopped(asyncio.ensure_future(main), time_limit_s):
            self.stop(f"the time limit of {time_limit_s:g} s" if time_limit_s is not None else "")

    async def _until_stopped(self, main: asyncio.Future[Any], limit_s: float | None) -> bool:
        """Wait until ``main`` ends, the run is stopped or the limit passes. Return False only if the limit passes."""
        stopper = asyncio.ensure_future(self._stop.wait())
        done, left = await asyncio.wait({main, stopper}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        if main in done:
            main.result()
        return bool(done)

    async def _open_loop(self) -> None:
        async with asyncio.TaskGroup() as group:
            for row, arrival_s in enumerate(self.workload.arrival_s.tolist()):
                deadline_s = self.start_s + arrival_s
                if row not in self._bodies:
                    self._bodies[row] = self._body(row)
                if (wait_s := deadline_s - time.perf_counter()) > 0:
                    await asyncio.sleep(wait_s)
                elif row % 8 == 0:  # if the loop is late, let it send the requests that have started
                    await asyncio.sleep(0)
                group.create_task(self._one(row, deadline_s))

    async def _closed_loop(self, concurrency: int) -> None:
        left = iter(range(len(self.workload)))

        async def worker() -> None:
            deadline_s = self.start_s
            for row in left:
                await self._one(row, deadline_s)
                deadline_s = time.perf_counter()

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(self.workload))):
                group.create_task(worker())

    async def _one(self, at: int, deadline_s: float) -> None:
        row = self.rows[at] = Row(deadline_s, self._limit(at))
        if self.prompts.how == "token ids":
            row.ids = int(self.workload.prompt_tokens[at])
        body = self._bodies.pop(at, None) or self._body(at)
        try:
            async with contextlib.aclosing(self.client.stream(body, sent=row.sent)) as chunks:
                async for chunk in chunks:
                    row.add(chunk)
        except RequestError as error:
            row.failure = error
        row.finished = True
        self._finished += 1
        self.report(self._finished)
        if row.failure is None:
            self._succeeded, self._consecutive_failures = self._succeeded + 1, 0
        elif row.failure.reason in LOST or not self._succeeded:
            self._consecutive_failures += 1
            if self._consecutive_failures >= self.give_up_after:
                self.stop(f"{self._consecutive_failures} failures in a row, the last: {row.failure}")
        else:
            self._consecutive_failures = 0

    def _body(self, at: int, round_: int = 0) -> bytes:
        workload, prompt = self.workload, self.prompts(at, round_)
        priority = int(workload.priority[at]) if self.priorities and workload.priority is not None else None
        limit = self._limit(at)
        return self.client.body(prompt, limit if limit < UNCAPPED else None, exact=self.exact, priority=priority)

    def _limit(self, at: int) -> int:
        """Return the output tokens that a request has if ``exact``, and may have otherwise."""
        workload = self.workload
        return int((workload.output_tokens if self.exact or workload.max_tokens is None else workload.max_tokens)[at])


SHARE, SIGNIFICANCE = 0.01, 0.05
MIN_P99_VALUES = math.ceil(math.log(SIGNIFICANCE) / math.log(1 - SHARE))  # 299; fewer may all lie below P99
MIN_EXCEEDANCES = 2  # a single exceedance in few requests is chance, however unlikely


def exceedance(values: Sequence[float] | Floats, limit: float) -> dict[str, Any]:
    """Count the values above a limit. "surely_often" states whether significantly more than SHARE (1 %) are above."""
    count, of = int((np.asarray(values, np.float64) > limit).sum()), len(values)
    return {
        "limit_s": limit if math.isfinite(limit) else None,
        "count": count,
        "of": of,
        "share": count / of if of else 0.0,
        "surely_often": count >= MIN_EXCEEDANCES and binomial_tail(count, of, SHARE) < SIGNIFICANCE,
    }


def binomial_tail(count: int, trials: int, probability: float) -> float:
    """Return the probability of ``count`` or more successes in a number of independent trials."""
    from scipy.special import bdtrc

    return float(bdtrc(count - 1, trials, probability))


_TICK_S = 0.02
_LATE_S, _LATE_SHARE, _MIN_LATE_S = 0.010, 0.05, 0.001
"""A request is late if sent 10 ms after it was due, or 5 % of the median TTFT if that is less (but at least 1 ms)."""

_LAG_SHARE = 0.5  # an event loop that wakes later than this share of the median TTFT reads many tokens at once
_BUSY = 0.8
_READINGS = 5
_SKEW_S, _SKEW_SHARE = 0.05, 2e-4


class Monitor:
    """Monitors the client itself during a run. ``close`` fills ``metadata``, from which ``warnings`` are made."""

    def __init__(self) -> None:
        self.start = datetime.now(UTC)
        self.start_s, self._cpu_s, self._offset_s = time.perf_counter(), time.process_time(), _clock_offset_s()
        self.lags: list[float] = []
        self.metadata: dict[str, Any] = {}

    async def run(self) -> None:
        """Record how late the event loop wakes up, until cancelled."""
        while True:
            deadline_s = time.perf_counter() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self.lags.append(max(0.0, time.perf_counter() - deadline_s))

    def close(self, late_s: Sequence[float] | Floats, median_ttft_s: float = math.inf) -> None:
        """Fill ``metadata``. ``late_s`` has the seconds from when each request was due until it was sent."""
        span_s = max(time.perf_counter() - self.start_s, 1e-9)
        self.metadata = {
            "late_s": _quantiles(late_s),
            "late": exceedance(late_s, min(_LATE_S, max(_MIN_LATE_S, _LATE_SHARE * median_ttft_s))),
            "loop_lag_s": _quantiles(self.lags),
            "loop_lag": exceedance(self.lags, max(_LATE_S, _LAG_SHARE * median_ttft_s)),
            "cpu_share": (time.process_time() - self._cpu_s) / span_s,
            "clock_skew_s": _clock_offset_s() - self._offset_s,
            "span_s": span_s,
            "median_ttft_s": median_ttft_s if math.isfinite(median_ttft_s) else None,
        }
        self.metadata["late_doubt"] = self._late_warning()  # a calibration may find this warning harmless

    def _late_warning(self) -> str | None:
        late, share = self.metadata["late"], self.metadata["cpu_share"]
        if not late["surely_often"]:
            return None
        cause = f"; it had {100 * share:.0f} % of a core: other work on its machine delayed it, or it was blocked"
        return (
            f"the client sent {late['count']:,} of {late['of']:,} requests ({100 * late['share']:.1f} %) more than "
            f"{1e3 * late['limit_s']:.1f} ms after they were due (the worst "
            f"{1e3 * self.metadata['late_s']['max']:.1f} ms{self._ttft()}); latencies, counted from when they were "
            f"due, include it{'' if share > MAX_CLIENT_CPU_SHARE else cause}"
        )

    def _ttft(self) -> str:
        ttft_s = self.metadata["median_ttft_s"]
        return "" if ttft_s is None else f"; median TTFT {1e3 * ttft_s:.1f} ms"

    def warnings(self) -> list[str]:
        """Return warnings about latencies: late requests, a slow or busy client, clocks that drift apart."""
        found, lag = [], self.metadata["loop_lag"]
        if self.metadata["late_doubt"] is not None:
            found.append(self.metadata["late_doubt"])
        if lag["surely_often"]:
            found.append(
                f"the client woke more than {1e3 * lag['limit_s']:.0f} ms late in {lag['count']:,} of {lag['of']:,} "
                f"checks (the worst {1e3 * self.metadata['loop_lag_s']['max']:.0f} ms{self._ttft()}): tokens may have "
                "waited to be read, so that TTFT is too long and the times between tokens are too short"
            )
        if (share := self.metadata["cpu_share"]) > _BUSY:
            reason = "it may itself be what was measured; lower the load, or use a machine of its own"
            found.append(f"the client kept {100 * share:.0f} % of a core busy: {reason}")
        skew = abs(self.metadata["clock_skew_s"])
        if skew > _SKEW_S + _SKEW_SHARE * self.metadata["span_s"]:
            problem = "records have monotonic times, so that logs with wall times do not agree with them"
            found.append(f"the wall clock moved by {skew:.2f} s against the monotonic one during the run; {problem}")
        return found


def _clock_offset_s() -> float:
    readings = []
    for _ in range(_READINGS):
        before_s, wall_s, after_s = time.perf_counter(), time.time(), time.perf_counter()
        readings.append((after_s - before_s, wall_s - (before_s + after_s) / 2))
    return min(readings)[1]


def _quantiles(values: Sequence[float] | Floats) -> dict[str, float | None]:
    if not len(values):
        return {"p50": 0.0, "p99": None, "max": 0.0}
    p50, p99, top = np.quantile(np.asarray(values), [0.5, 0.99, 1.0])
    return {"p50": float(p50), "p99": float(p99) if len(values) >= MIN_P99_VALUES else None, "max": float(top)}
