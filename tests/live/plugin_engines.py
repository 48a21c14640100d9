"""vLLMs that order, and bursts sent to them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
HELD_OUT = ("vllm:num_requests_running", "vllm:num_requests_waiting")
PLUGIN = ("--scheduler-cls", "lengthwise.gateway.plugin.LengthScheduler")


def additional(**settings: Any) -> tuple[str, str]:
    """The plug-in's settings as words of vLLM's command line."""
    return "--additional-config", json.dumps({"lengthwise": settings})


@contextlib.contextmanager
def vllm(
    python: str, model: Path, log: Path, *words: str, path: tuple[Path, ...] = (), port: int | None = None
) -> Iterator[Any]:
    """A vLLM of the model that sees this package's source; workers in processes of their own would start 8 s later."""
    import _vllm

    from lengthwise.backend.process import local_engine, reserved_port
    from lengthwise.gateway.demo.engines import ONE_PROCESS

    with contextlib.ExitStack() as stack:
        port = port or stack.enter_context(reserved_port())
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
        command += ["--max-model-len", "1024", "--enforce-eager", "--distributed-executor-backend", ONE_PROCESS, *words]
        env = {**_vllm.QUIET, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CACHE_ROOT": str(model.parent / "cache")}
        env["PYTHONPATH"] = ":".join(map(str, (ROOT / "src", *path)))
        with local_engine(command, port=port, env=env, log_path=log) as engine:
            yield engine


@dataclass(frozen=True)
class Job:
    """One request of a forced length, and additional fields of its body."""

    name: str
    tokens: int
    report: dict[str, Any] | None = None

    def body(self) -> dict[str, Any]:
        # Without the penalty random weights repeat one token for ever, and any mistake would look the same.
        fixed = {"model": "m", "temperature": 0, "ignore_eos": True, "frequency_penalty": 2.0}
        return fixed | {"prompt": f"job {self.name} of", "max_tokens": self.tokens} | (self.report or {})


def lengthwise(tokens: float, **more: Any) -> dict[str, Any]:
    """The fields that the plug-in reads."""
    return {"vllm_xargs": {"lengthwise_predicted": tokens} | more}


@dataclass(frozen=True)
class Burst:
    """What became of requests that came at once.

    Attributes:
        ended: Their names, as they ended.
        seconds: [each] from the first's start to its end.
        texts: Of each.
        refusals: Status and body of who was refused.
    """

    finished: list[str]
    seconds: dict[str, float]
    texts: dict[str, str]
    refusals: dict[str, tuple[int, str]]

    @property
    def mean_s(self) -> float:
        return sum(self.seconds.values()) / len(self.seconds)

    def places(self, names: set[str]) -> float:
        """Their mean place in the order of ending."""
        return sum(k for k, name in enumerate(self.finished) if name in names) / len(names)


def burst(url: str, jobs: list[Job], *, head: tuple[Job, ...] = (), head_s: float = 0.0) -> Burst:
    """Sends all at once: when the engine has who is in ``head``, and ``head_s`` later."""
    return asyncio.run(bursting(url, jobs, head, head_s=head_s))


async def bursting(
    url: str, jobs: list[Job], head: tuple[Job, ...] = (), *, max_num_seqs: Slots | None = None, head_s: float = 0.0
) -> Burst:
    """The same in a loop.

    Args:
        max_num_seqs: Occupied slots of the engine behind ``url``, which are freed once the engine has all requests.
    """
    import aiohttp

    out = Burst([], {}, {}, {})
    start_s = time.monotonic()

    async def one(session: aiohttp.ClientSession, job: Job) -> None:
        async with session.post(f"{url}/v1/completions", json=job.body()) as answer:
            text = await answer.text()
        if answer.status != 200:
            out.refusals[job.name] = answer.status, text
            return
        out.finished.append(job.name)
        out.seconds[job.name] = time.monotonic() - start_s
        out.texts[job.name] = json.loads(text)["choices"][0]["text"]

    async def present(sent: int) -> None:
        await holding(
            max_num_seqs.url if max_num_seqs else url,
            lambda: sent - len(out.finished) + (max_num_seqs.jobs if max_num_seqs else 0),
        )

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as tasks:
        for job in head:
            tasks.create_task(one(session, job))
        if head:
            await present(len(head))
            await asyncio.sleep(head_s)
        for job in jobs:
            tasks.create_task(one(session, job))
            await asyncio.sleep(0)
        if max_num_seqs:
            await present(len(head) + len(jobs))
            max_num_seqs.free.set()
    return out


async def holding(url: str, requests: Callable[[], int]) -> None:
    """Returns when the engine has so many, running or waiting: no seconds would fit both a slow machine and a fast one.

    Raises:
        TimeoutError: It did not within 30 s.
    """
    async with asyncio.timeout(30.0):
        while sum(await asyncio.to_thread(metrics, url, HELD_OUT)) < requests():  # noqa: ASYNC110 - the engine is asked
            await asyncio.sleep(0.05)


@dataclass
class Slots:
    """All slots of an engine, taken for as long as is wished by requests that no other request passes.

    Attributes:
        url: The engine's.
        jobs: As many of them as it has at any time: so many again wait for a seat.
        free: Set when no more are to come.
    """

    url: str
    jobs: int
    free: asyncio.Event = field(default_factory=asyncio.Event)


@contextlib.asynccontextmanager
async def taken(url: str, max_num_seqs: int, tokens: int, report: dict[str, Any]) -> AsyncIterator[Slots]:
    """Takes all slots; ``report`` puts the requests that take them in front of all others."""
    out = Slots(url, 2 * max_num_seqs)

    async def one(k: int) -> None:
        for turn in itertools.count():
            found = await bursting(url, [Job(f"blocker {k} {turn}", tokens, report)])
            assert found.refusals == {}
            if out.free.is_set():
                return

    async with asyncio.TaskGroup() as tasks:
        for k in range(out.jobs):
            tasks.create_task(one(k))
        await holding(url, lambda: out.jobs)
        yield out


def metric(url: str, name: str) -> float:
    """The sum of one of the engine's own numbers."""
    return metrics(url, (name,))[0]


def metrics(url: str, names: tuple[str, ...]) -> list[float]:
    """The sums of some of them, at one moment."""
    import urllib.request

    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reported:
        lines = reported.read().decode().splitlines()
    return [
        sum(float(line.split()[-1]) for line in lines if line.startswith((name + "{", name + " "))) for name in names
    ]


CLASSES, LIMIT = {"short": (0.5, 30), "medium": (0.35, 100), "long": (0.15, 300)}, 600
"""Share and median output tokens of each class of requests; the clients' limit, which no output reaches."""
LITTLE_MEMORY = ("--max-num-seqs", "16", "--block-size", "32", "--num-gpu-blocks-override", "35")


COUNTED = {"preemptions": "vllm:num_preemptions_total", "steps": "vllm:iteration_tokens_total_count"}
"""What the engine counts, whatever else the machine does."""


def _outputs(median: int, n: int, rng: np.random.Generator) -> list[int]:
    return rng.lognormal(np.log(median), 0.6, n).clip(4, LIMIT - 1).astype(int).tolist()


def _by_class(median: int) -> dict[str, Any]:
    """The hint of a predictor that knows a request's class and no more: medians, of what has not ended yet."""
    outputs, later = np.array(_outputs(median, 20_000, np.random.default_rng(99))), list[float]()
    for tokens in (25, 50, 100, 200, 400):
        longer = outputs[outputs > tokens]
        later += [tokens, float(np.median(longer))] if len(longer) > 20 else []
    return lengthwise(float(np.median(outputs)), lengthwise_later=later)


async def _ended_by_clients(url: str, hints: str, seed: int, n: int) -> dict[str, float]:
    """Sends n requests at once, whose clients leave after their outputs' tokens as an end of sequence would."""
    import aiohttp

    rng, ends_s, start_s = np.random.default_rng(seed), list[float](), time.monotonic()
    medians = rng.choice([median for _, median in CLASSES.values()], n, p=[share for share, _ in CLASSES.values()])
    outputs = [_outputs(median, 1, rng)[0] for median in medians]

    async def one(session: aiohttp.ClientSession, k: int) -> None:
        hint = {"own": {}, "class": _by_class(medians[k]), "exact": lengthwise(outputs[k])}[hints]
        words = {"prompt": f"job {k} of " + "words and more " * 15, "max_tokens": LIMIT, "stream": True}
        words["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        generated = 0  # a chunk may have several tokens
        async with session.post(f"{url}/v1/completions", json=Job("", 1).body() | words | hint) as answer:
            while generated < outputs[k]:
                line = await answer.content.readline()
                assert line, f"the stream ended after {generated} of {outputs[k]} tokens"
                if line.startswith(b"data: {"):
                    generated = json.loads(line[6:])["usage"]["completion_tokens"]
        ends_s.append(time.monotonic() - start_s)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session, asyncio.TaskGroup() as tasks:
        for k in range(n):
            tasks.create_task(one(session, k))
    return {"tokens_per_s": sum(outputs) / max(ends_s), "mean_jct_s": float(np.mean(ends_s))}


def in_little_memory(python: str, runs: int, n: int = 60) -> tuple[list[float], dict[str, list[dict[str, float]]]]:
    """Bursts at a vLLM with its own rule, and with memory reserved by lengths.

    Returns the tokens/s with lengths by class over those with vLLM's own rule, of each burst, and all numbers.
    """
    import _vllm

    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = _vllm.make_model(Path(folder) / "tiny", "tiny")
        for hints in ("own", "class", "exact"):
            settings = additional(rank="fcfs", preemption="never", reserve=hints != "own")
            with vllm(python, model, Path(folder) / f"{hints}.log", *LITTLE_MEMORY, *PLUGIN, *settings) as engine:
                asyncio.run(_ended_by_clients(engine.url, hints, 9, 8))
                found[hints] = []
                for seed in range(runs):
                    before = metrics(engine.url, tuple(COUNTED.values()))
                    run = asyncio.run(_ended_by_clients(engine.url, hints, seed, n))
                    counted = zip(COUNTED, metrics(engine.url, tuple(COUNTED.values())), before, strict=True)
                    found[hints].append(run | {name: after - so_far for name, after, so_far in counted})
    pairs = zip(found["class"], found["own"], strict=True)
    return [a["tokens_per_s"] / b["tokens_per_s"] for a, b in pairs], found
