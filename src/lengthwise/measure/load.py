"""The load generator: requests to a real server when they are due, and what came of them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import re
import secrets
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise import catalog
from lengthwise.backend.openai import Client
from lengthwise.backend.openai_protocol import Abilities, RequestError, Server
from lengthwise.measure.client_records import records_of
from lengthwise.measure.load_client import Monitor, Row, Run, machine, prompts_of
from lengthwise.measure.prefix_cache import found_doubt, prefix_facts
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import BENCH, Measured, Records, Status, TokenTimes, shape_facts
from lengthwise.schema.workload import Workload
from lengthwise.workload import Poisson

LONGEST = 200
MOST = 8
_OWN = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{20,}|\b(?:0x)?[0-9a-f]{12,}\b|\d+")
"""What makes a message of one request its own: ids and numbers."""


def failures_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Reason, message (its first characters) and count of what failed, the most frequent first.

    Messages that differ in numbers and ids alone are one, told as it came first; beyond ``MOST`` of one reason
    the rest is counted without a message.
    """
    count: Counter[tuple[str, str]] = Counter()
    shown: dict[tuple[str, str], str] = {}
    kinds: Counter[str] = Counter()
    for row in rows:
        if not row.reason:
            continue
        said = "" if row.failure is None else " ".join(row.failure.detail.split())[:LONGEST]
        key = row.reason, _OWN.sub("#", said)
        if key not in shown:
            kinds[row.reason] += 1
            key = key if kinds[row.reason] <= MOST else (row.reason, "")
        shown.setdefault(key, said if key[1] else "")
        count[key] += 1
    return [{"reason": key[0], "message": shown[key], "count": n} for key, n in count.most_common()]


Floats = npt.NDArray[np.float64]
_EXACT_SHARE = 0.01


def measured_of(run: Run, monitor: Monitor, end_s: float, metadata: Mapping[str, Any], seed: int) -> Measured:
    """What happened in a run; ``end_s`` is on the clock of ``time.perf_counter``."""
    rows, tokens = run.rows, _pieces(run.rows, run.start_s)
    records = _records(run, end_s - run.start_s, tokens, seed)
    told = [row for row in rows if row is not None]
    client_s = np.array([row.sent_s - row.deadline_s if row and row.sent_s is not None else np.nan for row in rows])
    errors = Counter(row.reason for row in told if row.reason)
    finished = [row for row in told if row.status == Status.FINISHED]
    ends = Counter(row.finish_reason or "not told" for row in finished)
    ttft_s = records.requests.first_token_s - records.requests.arrival_s
    ttft_s = ttft_s[np.isfinite(ttft_s)]
    monitor.close(client_s[np.isfinite(client_s)], float(np.median(ttft_s)) if len(ttft_s) else np.inf)
    own = {"client": monitor.metadata, "finish_reasons": dict(ends), "failures": failures_of(told)}
    every = {**metadata, **own, "prompts": run.prompts.how}
    found = found_doubt(every)
    return Measured(
        records,
        replace(run.workload, name=run.workload.name or "workload"),
        BENCH,
        every,
        (*_run_warnings(run, told, errors), *([found] if found else []), *monitor.warnings()),
        dict(errors),
        tokens,
        client_s,
    )


def _records(run: Run, end_s: float, tokens: TokenTimes, seed: int) -> Records:
    rows, workload = run.rows, run.workload
    closed = workload.concurrency is not None
    deadline_s = np.array([np.nan if row is None else row.deadline_s - run.start_s for row in rows])
    if not closed:
        deadline_s = workload.arrival_s.copy()  # also of those that the run's end came before
    done = [row is not None and row.status == Status.FINISHED for row in rows]
    last_s = [row.at_s[-1] - run.start_s if ok and row else np.nan for ok, row in zip(done, rows, strict=True)]
    return records_of(
        arrival_s=deadline_s,
        prompt_tokens=np.array([_prompt(row, int(n)) for row, n in zip(rows, workload.prompt_tokens, strict=True)]),
        output_tokens=np.array([row.output_tokens if row else 0 for row in rows]),
        status=[row.status if row else Status.UNFINISHED for row in rows],
        first_token_s=np.array([row.at_s[0] - run.start_s if row and row.at_s else np.nan for row in rows]),
        finished_s=np.array(last_s),
        end_s=end_s,
        tokens=tokens,
        seed=seed,
        name=workload.name,
    )


def _prompt(row: Row | None, desired: int) -> int:
    told = row.usage.prompt_tokens if row is not None and row.usage is not None else 0
    return desired if row is None or row.lied_of_prompt else told or desired


def _pieces(rows: Sequence[Row | None], start_s: float) -> TokenTimes:
    lengths = [0 if row is None else len(row.at_s) for row in rows]
    start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    at_s = [at for row in rows if row is not None for at in row.at_s]
    tokens = [count for row in rows if row is not None for count in row.counts]
    return TokenTimes(start, np.array(at_s, np.float64) - start_s, np.array(tokens, np.int64))


def _run_warnings(run: Run, report: Sequence[Row], errors: Mapping[str, int]) -> list[str]:
    made = list(run.prompts.warnings)
    finished = [row for row in report if row.status == Status.FINISHED]
    ended = sum(row.finished for row in report)
    if run.why_ended:
        made.append(
            f"a partial run, ended by {run.why_ended}: {ended:,} of {len(run.rows):,} requests had ended by then"
        )
    if failed := sum(errors.values()):
        entries = ", ".join(f"{name}: {count:,}" for name, count in sorted(errors.items()))
        made.append(f"{failed:,} of {len(report):,} requests failed ({entries}); latencies are of the others")
    return made + _lengths(run, finished) + _tokens(run.client.capabilities, finished)


def _lengths(run: Run, finished: Sequence[Row]) -> list[str]:
    """Where prompts or outputs are not as long as was asked for."""
    made = []
    workload = run.workload
    rows = [(i, row) for i, row in enumerate(run.rows) if row is not None and row.status == Status.FINISHED]
    told = [(int(workload.prompt_tokens[i]), row.usage.prompt_tokens) for i, row in rows if row.usage is not None]
    wrong = [(want, got) for want, got in told if got and want != got]
    if len(wrong) > _EXACT_SHARE * len(finished):
        off = float(np.mean([got / want - 1 for want, got in wrong]))
        made.append(
            f"{len(wrong):,} of {len(finished):,} prompts were not as long as wanted by the server's count "
            f"({100 * off:+.1f} % on average); records hold its count"
        )
    short = [row for row in finished if row.output_tokens != row.wanted_tokens]
    if len(short) > _EXACT_SHARE * len(finished):
        share = sum(r.output_tokens for r in short) / max(1, sum(r.wanted_tokens for r in short))
        made.append(
            f"{len(short):,} of {len(finished):,} outputs were not as long as wanted ({100 * share:.0f} % of it): "
            "the server does not ignore the end of text; compare only with a simulation of the lengths that came"
        )
    return made


def _tokens(capabilities: Abilities, finished: Sequence[Row]) -> list[str]:
    """Where numbers or times of tokens are not known."""
    if finished and not any(row.usage is not None or any(row.tokens) for row in finished):
        return ["the server does not tell how many tokens it made: each piece was taken for one"]
    vague = sum(not any(row.counts) for row in finished)
    if vague and not (capabilities.usage_each or capabilities.ids_each):
        doubt = (
            f"in {vague:,} of {len(finished):,} answers a piece held several tokens and nobody told how many: "
            "times between tokens (TBT) are times between pieces there"
        )
        return [doubt]
    return []


def deployment_facts(measured: Measured, deployment: Mapping[str, Any]) -> Measured:
    """The run with what is behind the server, doubted where the server itself says otherwise."""
    found = tuple(_deployment_warnings(measured.metadata, deployment))
    metadata = {**measured.metadata, "deployment": dict(deployment)}
    return replace(measured, metadata=metadata, warnings=(*found, *measured.warnings))


def _deployment_warnings(metadata: Mapping[str, Any], deployment: Mapping[str, Any]) -> Iterator[str]:
    served = catalog.served_model(str(metadata["model"]))
    shape = deployment.get("model_shape")
    if served is not None and shape is not None and shape_facts(served) != dict(shape):
        yield (
            f"the server says that it serves {metadata['model']}, which is of another shape than the deployment's "
            f"{deployment.get('model')}"
        )
    longest, own = metadata["capabilities"]["max_model_len"], deployment.get("max_model_len")
    if longest is not None and own is not None and longest != own:
        yield (
            f"the server takes {longest:,} tokens a request (max_model_len), and the deployment is said to take {own:,}"
        )


EVERY_S = 1.0
_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_SKIPPED = re.compile(r"_created$|^python_|^process_|^http_")
_KEPT_BUCKETS = "iteration_tokens_total_bucket"
"""How many tokens steps had, which a calibration reads; other histograms are told by their sum and count."""
_BOUND = re.compile(r'(?:^|,)le="([0-9.eE+]+)"')


async def look(client: Client, within_s: float) -> dict[str, float] | None:
    """What a server's ``/metrics`` says now, as ``samples``; None where it does not in time."""
    try:
        async with asyncio.timeout(within_s):
            text = await _page(client)
    except TimeoutError:
        return None
    return None if text is None else samples(text)


async def _page(client: Client) -> str | None:
    try:
        status, text = await client.fetch("GET", f"{client.server.root}/metrics")
    except RequestError:
        return None
    return text if status == 200 and isinstance(text, str) else None


class Scrape:
    """Columns of what ``/metrics`` told: a row a second, summed over labels, and a histogram's buckets by bound."""

    def __init__(self, client: Client, start_s: float) -> None:
        self._client, self._start_s = client, start_s
        self.at_s: list[float] = []
        self.duration_s: list[float] = []
        self.rows: list[dict[str, float]] = []

    async def run(self) -> None:
        """Asks until it is cancelled; a second in which the server does not answer is left out."""
        while True:
            started_s = time.perf_counter()
            text = await _page(self._client)
            if text is not None:
                self.at_s.append(started_s - self._start_s)
                self.duration_s.append(time.perf_counter() - started_s)
                self.rows.append(samples(text))
            await asyncio.sleep(max(0.0, started_s + EVERY_S - time.perf_counter()))

    def columns(self) -> dict[str, list[float | None]]:
        """[seconds] a column a metric; "at_s", when it was asked, and "took_s" until the answer was there.

        None where a metric was not told.
        """
        names = sorted({name for row in self.rows for name in row})
        columns: dict[str, list[float | None]] = {"at_s": [*self.at_s], "duration_s": [*self.duration_s]}
        return columns | {n: [row.get(n) for row in self.rows] for n in names}


def samples(text: str) -> dict[str, float]:
    """Metrics in Prometheus' text format, by name, summed over labels; tokens of steps also by bucket."""
    found: dict[str, Any] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        name = None if match is None else _column(match[1], match[2] or "")
        if match is None or name is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if math.isfinite(value):
            found[name] = found.get(name, 0.0) + value
    return found


def _column(name: str, labels: str) -> str | None:
    """What a sample is kept as; of buckets those that are kept, by their bound: ``NAME{le="8"}``."""
    if _SKIPPED.search(name):
        return None
    if not name.endswith("_bucket"):
        return name
    bound = _BOUND.search(labels) if name.endswith(_KEPT_BUCKETS) else None
    return None if bound is None else f'{name}{{le="{float(bound[1]):g}"}}'


INTERRUPTED = "an interruption"
_POLL_INTERVAL_S = 2.0
"""How long a server may take to tell its counters before a run and after it."""


def bench(
    server: Server | str,
    workload: Workload,
    *,
    rate_rps: float | None = None,
    concurrency: int | None = None,
    seed: int = 0,
    salt: int | None = None,
    warmup_requests: int = 0,
    time_limit_s: float = math.inf,
    exact: bool = True,
    shared_prefix: float = 0.0,
    priorities: bool = False,
    scrape: bool = False,
    give_up_after: int = 10,
    capabilities: Abilities | None = None,
    deployment: Mapping[str, Any] | None = None,
    report: Callable[[int, int], None] = lambda *_: None,
) -> Measured:
    """What a server does with a workload, in the records of a simulation.

    Open loop: each request is sent when it is due, whatever became of those before, and latencies count from
    then. Closed loop: the next is due when one ends. Ctrl-C ends the run and keeps what there is, and so do
    the time limit and a server that is gone.

    Args:
        server: Its address, or all of how it is asked.
        workload: Arrivals, or a concurrency, and lengths; texts where ``extra`` has "prompt".
        rate_rps: Poisson arrivals of this rate instead of the workload's own.
        concurrency: A closed loop of so many requests instead.
        seed: Of the arrivals and of the prompts.
        salt: Of the prompts as well: with another one they share nothing, so that no prefix cache knows them. None:
            a new one, kept in ``facts["arguments"]``; the same again sends the same bytes.
        warmup_requests: So many requests before, which nobody counts.
        time_limit_s: Ends the run; what is under way then is UNFINISHED.
        exact: Ask for outputs of exactly the workload's lengths; otherwise these are the most there may be.
        shared_prefix: Share of each prompt's tokens, from its beginning, that all prompts have in common.
        priorities: Send the workload's priorities, to servers that know them.
        scrape: Ask the server's ``/metrics`` every second, into ``facts["metrics"]``.
        give_up_after: So many lost requests in a row end the run.
        capabilities: What the server can do, where that was probed before.
        deployment: What is known to be behind the address, for ``facts["deployment"]`` (see ``Measured``).
        report: Called with the requests that ended and those there are.

    Raises:
        InputError: Rate and concurrency are given both, a number is out of range, or no server answers.
        MissingExtraError: aiohttp is not installed.
    """
    asked = server if isinstance(server, Server) else Server(server)
    if salt is not None and salt < 0:
        raise InputError(f"salt must be from 0; it is {salt}: leave it out for a new one")
    if warmup_requests < 0 or give_up_after < 1 or not time_limit_s > 0:
        raise InputError(
            "warmup_requests must be from 0, give_up_after from 1 and time_limit_s above 0; they are "
            f"{warmup_requests}, {give_up_after} and {time_limit_s}"
        )
    loaded = under_load(workload, rate_rps, concurrency, seed)
    options: dict[str, Any] = {
        "seed": seed,
        "salt": secrets.randbits(32) if salt is None else salt,
        "warmup_requests": warmup_requests,
        "time_limit_s": time_limit_s if math.isfinite(time_limit_s) else None,
        "exact": exact,
        "shared_prefix": shared_prefix,
        "priorities": priorities,
        "give_up_after": give_up_after,
        "rate_rps": rate_rps,
        "concurrency": loaded.concurrency,
    }
    measured = asyncio.run(_bench(asked, loaded, options, capabilities, report, scrape=scrape))
    return measured if deployment is None else deployment_facts(measured, deployment)


def under_load(workload: Workload, rate_rps: float | None, concurrency: int | None, seed: int) -> Workload:
    """The workload with other arrivals, where these are given; raises InputError."""
    workload.require_nobody_after("a load on a real server")
    if rate_rps is not None and concurrency is not None:
        raise InputError("a rate (open loop) excludes a concurrency (closed loop); give one of them")
    if concurrency is not None:
        zeros = np.zeros(len(workload))
        return dataclasses.replace(workload, arrival_s=zeros, concurrency=concurrency)
    if rate_rps is not None:
        arrival_s = Poisson(rate_rps).sample(len(workload), np.random.default_rng([seed, 3]))
        return dataclasses.replace(workload, arrival_s=arrival_s, concurrency=None)
    return workload


async def _bench(
    server: Server,
    workload: Workload,
    options: dict[str, Any],
    capabilities: Abilities | None,
    report: Callable[[int, int], None],
    *,
    scrape: bool,
) -> Measured:
    seed = options["seed"]
    async with Client(server, capabilities) as client:
        if capabilities is None:
            await client.probe()
        prompts = await prompts_of(client, workload, seed=seed, salt=options["salt"], shared=options["shared_prefix"])
        run = Run(
            client, workload, prompts, options["exact"], options["priorities"], options["give_up_after"],
            lambda done: report(done, len(workload)),
        )  # fmt: skip
        run.prepare()
        with _interruptible(run):
            await run.warm_up(options["warmup_requests"])
            before = await look(client, _POLL_INTERVAL_S)
            watch = Monitor()
            seen = Scrape(client, watch.start_s) if scrape else None
            await _monitor_task(run, watch, seen, options["time_limit_s"])
            end_s = time.perf_counter()
            after = await look(client, _POLL_INTERVAL_S)
        metadata = _metadata(client, watch, options, seen) | prefix_facts(before, after)
        return measured_of(run, watch, end_s, metadata, seed)


async def _monitor_task(run: Run, monitor: Monitor, seen: Scrape | None, limit_s: float | None) -> None:
    beside = [asyncio.ensure_future(monitor.run())]
    beside += [asyncio.ensure_future(seen.run())] if seen is not None else []
    try:
        await run.go(limit_s)
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)


@contextlib.contextmanager
def _interruptible(run: Run) -> Iterator[None]:
    """Ctrl-C stops the run, where this thread may listen for it; a second one ends the program."""
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        run.stop(INTERRUPTED)

    try:
        loop.add_signal_handler(signal.SIGINT, interrupted)
    except (NotImplementedError, RuntimeError, ValueError):
        yield  # Windows, or not the main thread: the usual KeyboardInterrupt stays
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _metadata(client: Client, monitor: Monitor, options: dict[str, Any], seen: Scrape | None) -> dict[str, Any]:
    able = client.capabilities
    metadata = {
        "url": client.server.shown,
        "engine": able.engine,
        "version": able.version,
        "model": able.model,
        "capabilities": dataclasses.asdict(able) | {"models": list(able.models)},
        "arguments": options,
        "start": monitor.start.isoformat(),
        "clock": "time.perf_counter (monotonic)",
        "machine": machine(),
    }
    return metadata if seen is None else metadata | {"metrics": seen.columns()}
