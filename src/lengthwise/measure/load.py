"""Load generator: sends requests to a real server when they are due, and records when chunks arrive."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import platform
import re
import secrets
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lengthwise import catalog
from lengthwise.backend.openai import Client
from lengthwise.backend.openai_protocol import Capabilities, RequestError, Server
from lengthwise.measure.client_records import records_of
from lengthwise.measure.load_client import Monitor, Row, Run, prompts_of
from lengthwise.measure.prefix_cache import cache_counts, cache_warning
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import BENCH, Ints, RunResult, Status, TokenTimes, shape_facts
from lengthwise.schema.workload import SharedPrefixes, Workload
from lengthwise.workload import Poisson

MAX_MESSAGE_CHARS, MAX_MESSAGES = 200, 8
_REQUEST_SPECIFIC = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{20,}|\b(?:0x)?[0-9a-f]{12,}\b|\d+")  # ids and numbers


def failures_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Count failures by reason and message (without numbers and ids), most frequent first. Rare messages become ""."""
    count: Counter[tuple[str, str]] = Counter()
    shown: dict[tuple[str, str], str] = {}
    kinds: Counter[str] = Counter()
    for row in rows:
        if not row.reason:
            continue
        message = "" if row.failure is None else " ".join(row.failure.detail.split())[:MAX_MESSAGE_CHARS]
        key = row.reason, _REQUEST_SPECIFIC.sub("#", message)
        if key not in shown:
            kinds[row.reason] += 1
            key = key if kinds[row.reason] <= MAX_MESSAGES else (row.reason, "")
        shown.setdefault(key, message if key[1] else "")
        count[key] += 1
    return [{"reason": key[0], "message": shown[key], "count": n} for key, n in count.most_common()]


_EXACT_SHARE = 0.01


def run_result(run: Run, monitor: Monitor, end_s: float, metadata: Mapping[str, Any], seed: int) -> RunResult:
    """Return the records, metadata and warnings of a run. ``end_s`` is a time of ``time.perf_counter``."""
    rows, workload = run.rows, run.workload
    sent = [row for row in rows if row is not None]
    start = np.concatenate([[0], np.cumsum([0 if row is None else len(row.at_s) for row in rows])]).astype(np.int64)
    at_s = np.array([at for row in sent for at in row.at_s], np.float64) - run.start_s
    tokens = TokenTimes(start, at_s, np.array([count for row in sent for count in row.counts], np.int64))
    arrival_s = workload.arrival_s.copy()  # includes requests that were not due before the run stopped
    if workload.concurrency is not None:
        arrival_s = np.array([row.deadline_s - run.start_s if row else np.nan for row in rows])
    counted = [row.usage.prompt_tokens if row and row.usage and not row.invalid_prompt_usage else 0 for row in rows]
    finished = [row if row and row.status == Status.FINISHED else None for row in rows]
    records = records_of(
        arrival_s=arrival_s,
        prompt_tokens=np.where(counted, counted, workload.prompt_tokens),
        output_tokens=np.array([row.output_tokens if row else 0 for row in rows]),
        status=[row.status if row else Status.UNFINISHED for row in rows],
        first_token_s=np.array([row.at_s[0] - run.start_s if row and row.at_s else np.nan for row in rows]),
        finished_s=np.array([row.at_s[-1] - run.start_s if row else np.nan for row in finished]),
        end_s=end_s - run.start_s,
        tokens=tokens,
        seed=seed,
        name=workload.name,
    )
    client_s = np.array([row.sent_s - row.deadline_s if row and row.sent_s is not None else np.nan for row in rows])
    errors = Counter(row.reason for row in sent if row.reason)
    ttft_s = records.requests.first_token_s - records.requests.arrival_s
    ttft_s = ttft_s[np.isfinite(ttft_s)]
    monitor.close(client_s[np.isfinite(client_s)], float(np.median(ttft_s)) if len(ttft_s) else np.inf)
    complete = {
        **metadata,
        "client": monitor.metadata,
        "finish_reasons": Counter(row.finish_reason or "unknown" for row in sent if row.status == Status.FINISHED),
        "failures": failures_of(sent),
        "prompts": run.prompts.how,
    }
    cached = None if workload.prefixes is not None else cache_warning(complete)
    warnings = (*_run_warnings(run, sent, errors), *([cached] if cached else []), *monitor.warnings())
    requested = replace(workload, name=workload.name or "workload")
    return RunResult(records, requested, BENCH, complete, warnings, dict(errors), tokens, client_s)


def _run_warnings(run: Run, sent: Sequence[Row], errors: Mapping[str, int]) -> list[str]:
    found = list(run.prompts.warnings)
    finished = [row for row in sent if row.status == Status.FINISHED]
    if run.stop_reason:
        count = f"{sum(row.finished for row in sent):,} of {len(run.rows):,}"
        found.append(f"a partial run, ended by {run.stop_reason}: {count} requests had finished by then")
    if failed := sum(errors.values()):
        entries = ", ".join(f"{name}: {count:,}" for name, count in sorted(errors.items()))
        found.append(f"{failed:,} of {len(sent):,} requests failed ({entries}); latencies are of the others")
    wrong = [
        row.usage.prompt_tokens / requested
        for row, requested in zip(run.rows, run.workload.prompt_tokens.tolist(), strict=True)
        if row and row.status == Status.FINISHED and row.usage and row.usage.prompt_tokens not in {0, requested}
    ]
    if len(wrong) > _EXACT_SHARE * len(finished):
        found.append(
            f"{len(wrong):,} of {len(finished):,} prompts were not as long as requested by the server's count "
            f"({100 * (float(np.mean(wrong)) - 1):+.1f} % on average); records hold its count"
        )
    short = [row for row in finished if row.output_tokens != row.requested_tokens] if run.exact else []
    if len(short) > _EXACT_SHARE * len(finished):
        share = sum(r.output_tokens for r in short) / max(1, sum(r.requested_tokens for r in short))
        found.append(
            f"{len(short):,} of {len(finished):,} outputs were not as long as requested ({100 * share:.0f} % of it): "
            "the server does not ignore the end of text; compare only with a simulation of the measured lengths"
        )
    if finished and not any(row.usage is not None or any(row.tokens) for row in finished):
        found.append("the server does not report how many tokens it generated: each chunk was counted as one")
        return found
    unknown = sum(not any(row.counts) for row in finished)
    if unknown and not (run.client.capabilities.usage_each or run.client.capabilities.token_ids_each):
        detail = "whose number is unknown: times between tokens (TBT) are times between chunks there"
        found.append(f"in {unknown:,} of {len(finished):,} answers a chunk held several tokens, {detail}")
    return found


def with_deployment(measured: RunResult, deployment: Mapping[str, Any]) -> RunResult:
    """Return the run with the deployment in its metadata, and a warning for each value that the server contradicts."""
    metadata, found = measured.metadata, []
    served, shape = catalog.served_model(str(metadata["model"])), deployment.get("model_shape")
    if served is not None and shape is not None and shape_facts(served) != dict(shape):
        shapes = f"{metadata['model']}, which is of another shape than the deployment's {deployment.get('model')}"
        found.append(f"the server reports that it serves {shapes}")
    reported, own = metadata["capabilities"]["max_model_len"], deployment.get("max_model_len")
    if reported is not None and own is not None and reported != own:
        found.append(f"the server takes {reported:,} tokens a request (max_model_len), and the deployment {own:,}")
    return replace(
        measured, metadata={**metadata, "deployment": dict(deployment)}, warnings=(*found, *measured.warnings)
    )


SCRAPE_INTERVAL_S = 1.0
_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_SKIPPED = re.compile(r"_created$|^python_|^process_|^http_")
_STEP_TOKENS_BUCKET = "iteration_tokens_total_bucket"  # the only histogram whose buckets are recorded
_BOUND = re.compile(r'(?:^|,)le="([0-9.eE+]+)"')


async def _metrics_text(client: Client) -> str | None:
    try:
        status, _, text = await client.request("GET", f"{client.server.root}/metrics")
    except RequestError:
        return None
    return text if status == 200 and isinstance(text, str) else None


async def _scrape(client: Client, start_s: float, rows: list[dict[str, float]]) -> None:
    while True:
        started_s = time.perf_counter()
        text = await _metrics_text(client)
        if text is not None:
            times = {"at_s": started_s - start_s, "took_s": time.perf_counter() - started_s}
            rows.append(times | parse_metrics(text))
        await asyncio.sleep(max(0.0, started_s + SCRAPE_INTERVAL_S - time.perf_counter()))


def parse_metrics(text: str) -> dict[str, float]:
    """Return Prometheus values by name, summed over labels. Of histograms, only that of tokens per step has buckets."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None or _SKIPPED.search(match[1]):
            continue
        name = match[1]
        if name.endswith("_bucket"):
            bound = _BOUND.search(match[2] or "") if name.endswith(_STEP_TOKENS_BUCKET) else None
            if bound is None:
                continue
            name = f'{name}{{le="{float(bound[1]):g}"}}'
        with contextlib.suppress(ValueError):
            if math.isfinite(value := float(match[3])):
                found[name] = found.get(name, 0.0) + value
    return found


INTERRUPTED = "an interruption"
_METRICS_TIMEOUT_S = 2.0  # limit for reading the server's counters before and after a run
_PREFIX_BLOCK = 16  # tokens; common block sizes of engines are multiples of it


def one_prefix(prompt_tokens: Ints, share: float) -> SharedPrefixes:
    """Return prefixes by which prompts of these lengths ([n]) have this share of their first tokens in common."""
    blocks = (share * prompt_tokens).astype(np.int64) // _PREFIX_BLOCK
    start = np.concatenate([[0], np.cumsum(blocks)])
    return SharedPrefixes(_PREFIX_BLOCK, start, np.arange(start[-1]) - np.repeat(start[:-1], blocks))


@dataclass(frozen=True)
class LoadSettings:
    """Settings of a load test. Raises InputError for an invalid value, or for both a rate and a concurrency."""

    rate_rps: float | None = None  # Poisson arrivals of this rate instead of the workload's own
    concurrency: int | None = None  # a closed loop of this many clients instead of the workload's arrivals
    seed: int = 0
    # Prompts of another salt share nothing, so that no prefix cache has them. None: a new salt, which the metadata
    # records. Equal seeds and salts send equal prompts.
    salt: int | None = None
    warmup_requests: int = 0  # requests before the run, which do not count
    time_limit_s: float = math.inf
    exact: bool = True  # request outputs of exactly the workload's lengths; otherwise these, or max_tokens, are maxima
    shared_prefix: float = 0.0  # share of each prompt's tokens, from its start, that all prompts have in common
    priorities: bool = False  # send the workload's priorities, to servers that support them
    scrape: bool = False  # read the server's ``/metrics`` every second, into ``metadata["metrics"]``
    give_up_after: int = 10  # consecutive lost requests, or failures before any success, that stop the run

    def __post_init__(self) -> None:
        if self.salt is not None and self.salt < 0:
            raise InputError(f"salt must be from 0; it is {self.salt}: leave it out for a new one")
        if self.warmup_requests < 0 or self.give_up_after < 1 or not self.time_limit_s > 0:
            found = f"they are {self.warmup_requests}, {self.give_up_after} and {self.time_limit_s}"
            raise InputError(f"warmup_requests must be from 0, give_up_after from 1 and time_limit_s above 0; {found}")
        if self.rate_rps is not None and self.concurrency is not None:
            raise InputError("a rate (open loop) excludes a concurrency (closed loop); give one of them")

    def applied_to(self, workload: Workload) -> Workload:
        """Return the workload with these settings: Poisson arrivals or a closed loop, and a shared prefix."""
        workload.require_independent("a load on a real server")
        if self.shared_prefix and "prompt" not in workload.extra:
            workload = replace(workload, prefixes=one_prefix(workload.prompt_tokens, self.shared_prefix))
        if self.concurrency is not None:
            return replace(workload, arrival_s=np.zeros(len(workload)), concurrency=self.concurrency)
        if self.rate_rps is not None:
            arrival_s = Poisson(self.rate_rps).sample(len(workload), np.random.default_rng([self.seed, 3]))
            return replace(workload, arrival_s=arrival_s, concurrency=None)
        return workload


def bench(
    server: Server | str,
    workload: Workload,
    settings: LoadSettings = LoadSettings(),
    *,
    capabilities: Capabilities | None = None,
    deployment: Mapping[str, Any] | None = None,
    report: Callable[[int, int], None] = lambda *_: None,
) -> RunResult:
    """Send a workload to a server and measure it. The result has the form of a simulation's records.

    In an open loop, each request is sent when it is due, regardless of earlier ones. In a closed loop, the next request
    is due when one finishes. Latencies count from when a request is due. Ctrl-C, the time limit or a lost server stop
    the run, which returns its results so far. Raises InputError if no server answers or it cannot serve the model.

    Args:
        workload: Lengths, with arrivals or a concurrency; the prompts come from ``extra["prompt"]`` if that is given.
        capabilities: Those of the server; None finds them with test requests.
        deployment: The deployment behind the server, which ``metadata["deployment"]`` records.
        report: Receives the number of finished requests and of all requests, after each request.
    """
    loaded = settings.applied_to(workload)
    salt = secrets.randbits(32) if settings.salt is None else settings.salt
    server = server if isinstance(server, Server) else Server(server)
    measured = asyncio.run(_bench(server, loaded, replace(settings, salt=salt), capabilities, report))
    return measured if deployment is None else with_deployment(measured, deployment)


async def _bench(
    server: Server,
    workload: Workload,
    settings: LoadSettings,
    capabilities: Capabilities | None,
    report: Callable[[int, int], None],
) -> RunResult:
    limit_s = settings.time_limit_s
    arguments = dataclasses.asdict(settings) | {"concurrency": workload.concurrency}
    arguments["time_limit_s"] = limit_s if math.isfinite(limit_s) else None
    del arguments["scrape"]
    async with Client(server, capabilities) as client:

        async def counters() -> dict[str, float] | None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_METRICS_TIMEOUT_S):
                    text = await _metrics_text(client)
                    return None if text is None else parse_metrics(text)
            return None

        if capabilities is None:
            await client.probe()
        seed, salt = settings.seed, arguments["salt"]
        prompts = await prompts_of(client, workload, seed=seed, salt=salt, shared=settings.shared_prefix)
        run = Run(
            client,
            workload,
            prompts,
            settings.exact,
            settings.priorities,
            settings.give_up_after,
            lambda done: report(done, len(workload)),
        )
        run.prepare()
        with _interruptible(run):
            await run.warm_up(settings.warmup_requests)
            before = await counters()
            monitor = Monitor()
            scraped: list[dict[str, float]] = []
            background = [asyncio.ensure_future(monitor.run())]
            background += [asyncio.ensure_future(_scrape(client, monitor.start_s, scraped))] if settings.scrape else []
            try:
                await run.send_all(arguments["time_limit_s"])
            finally:
                for task in background:
                    task.cancel()
                await asyncio.gather(*background, return_exceptions=True)
            end_s = time.perf_counter()
            after = await counters()
        found = client.capabilities
        metadata: dict[str, Any] = {
            "url": client.server.shown,
            **{name: getattr(found, name) for name in ("engine", "version", "model")},
            "capabilities": dataclasses.asdict(found) | {"models": list(found.models)},
            "arguments": arguments,
            "start": monitor.start.isoformat(),
            "clock": "time.perf_counter (monotonic)",
            "machine": {
                "system": platform.platform(),
                "python": platform.python_version(),
                "cpus": os.cpu_count(),
                "processor": platform.processor() or platform.machine(),
            },
            **cache_counts(before, after),
        }
        if settings.scrape:
            names = dict.fromkeys(["at_s", "took_s", *sorted({name for row in scraped for name in row})])
            metadata["metrics"] = {name: [row.get(name) for row in scraped] for name in names}
        return run_result(run, monitor, end_s, metadata, seed)


@contextlib.contextmanager
def _interruptible(run: Run) -> Iterator[None]:
    """Within the block, the first Ctrl-C stops the run and a second one ends the program, if signals can be handled."""
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        run.stop(INTERRUPTED)

    # On Windows, or outside of the main thread, the usual KeyboardInterrupt stays.
    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
        loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.remove_signal_handler(signal.SIGINT)
