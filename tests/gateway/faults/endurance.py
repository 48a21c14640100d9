"""Run `lengthwise serve` under load, with a fault in every period, and compare every answer with its request's own.

python tests/gateway/faults/endurance.py --minutes 60 prints one line of JSON; the exit code is 1 if a request was lost.

The gateway, its engines and PostgreSQL are processes. Requests come over TLS in an open loop, from tenants of the store
and from a key of the file. At the end of each period the load pauses until all requests have ended: nothing of them may
be left then.
"""

from __future__ import annotations

import argparse
import asyncio
import codecs
import contextlib
import hashlib
import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import aiohttp
import numpy as np
import trustme

sys.path.append(str(Path(__file__).parents[2] / "apps" / "ledger"))
from postgres_world import Server, programs

from lengthwise.backend.process import free_port
from lengthwise.gateway.telemetry.journal import Row, read_all
from lengthwise.statistics import t_quantile
from lengthwise.testing.engine_server.completions import ToyModel, chat_ids, prompt_ids, token_bytes

ENGINES, SEQS, STEP_S = 4, 8, 0.02
SHORTEST, LONGEST = 10, 70
LOAD = 0.6
STALL_S, BURST, SLOW_S, PATIENCE_S = 3.0, 24, 2.0, 90.0
"""The burst comes with each fault, so that requests wait. A request is delayed above SLOW_S, lost after PATIENCE_S."""
SPARE_TASKS = 15  # more tasks of the idle gateway than at first
TENANTS = {"steady": 0, "batch": 5, "leaving": 0, "file": 0}
"""Priorities by tenant; clients of "leaving" disconnect, and the key of "file" is in the configuration."""
STORED = ("steady", "batch", "leaving")
ENDS = {"finished": "answered", "client_gone": "left by clients", "left": "left by clients", "unsent": "not connected"}
"""Words of the table of faults for outcomes."""
DOCUMENTED = ("store_unavailable", "draining", "engine_failed", "no_engine", "not_ready", "stopped")
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
"""Debian's package faketime; without it no clock jumps."""
ADMIN, DISK_MIB = "admin", 192
CONFIG = """
engines = [{engines}]
[listen]
port = {port}
admin_port = {admin_port}
journal = "{disk}/journal.jsonl"
tls = {{cert = "{folder}/cert.pem", key = "{folder}/key.pem"}}
[order]
fairness = "vtc"
max_wait_s = {max_wait_s}
[prediction]
predictor = "none"
[resilience]
health_every_s = 0.5
connect_s = 2.0
first_byte_s = {stall_s}
stall_s = {stall_s}
open_s = 1.0
drain_s = 20.0
[tenants]
store = "{store}"
admin_sha256 = "{admin}"
progress = "{disk}"
refresh_s = 1.0
[[keys]]
tenant = "file"
sha256 = "{file_key}"
"""


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def expected_text(ids: list[int], tokens: int) -> str:
    """The text that every engine writes to a prompt."""
    model, written = ToyModel("toy", ids), []
    for _ in range(tokens):
        token = model.next(may_end=False)
        model.read((token,))
        written.append(token_bytes(token))
    return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(written))


@dataclass
class Sent:
    """A request and its end: "answered", "left" (by its client), the code of an error, "unsent", or what was wrong."""

    number: int
    tenant: str
    chat: bool
    stream: bool
    tokens: int
    sent_s: float = math.nan
    ended_s: float = math.nan
    outcome: str = ""
    detail: str = ""
    prompt_tokens: int = 0
    received: int = 0  # tokens, where the answer has ids

    @property
    def delay_s(self) -> float:
        return self.ended_s - self.sent_s - self.tokens * STEP_S

    @property
    def lost(self) -> bool:
        return self.outcome not in ("answered", "left", "unsent", *DOCUMENTED)

    def body(self) -> dict[str, Any]:
        words = f"{self.tenant} {self.number}:" + " and so on" * (self.number % 40)
        prompt = {"messages": [{"role": "user", "content": words}]} if self.chat else {"prompt": words}
        fields = {"model": "toy", "max_tokens": self.tokens, "ignore_eos": True, "temperature": 0, **prompt}
        if self.stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        return fields | ({"return_token_ids": True} if self.tenant == "leaving" else {})

    def judge(self, status: int, raw: bytes) -> None:
        """Compare the answer with the text of this request."""
        body = self.body()
        ids = chat_ids(body) if self.chat else prompt_ids(body["prompt"])
        try:
            self._judge(status, raw, ids)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            self.outcome, self.detail = "malformed", f"{error!r}: {raw[-300:]!r}"

    def _judge(self, status: int, raw: bytes, ids: list[int]) -> None:
        if self.stream and status == 200:
            *events, last = [one.removeprefix("data: ") for one in raw.decode().removesuffix("\n\n").split("\n\n")]
            parsed = [json.loads(event) for event in (events if last == "[DONE]" else [*events, last])]
            if last != "[DONE]" and "error" not in parsed[-1]:
                self.outcome, self.detail = "truncated", raw[-300:].decode("utf-8", "replace")
                return
        else:
            last, parsed = "[DONE]", [json.loads(raw)]
        if "error" in parsed[-1]:
            error = parsed[-1]["error"]
            self.outcome, self.detail = error["code"] or error["type"], error["message"]
            return
        found = [choice for event in parsed for choice in event["choices"]]
        field_name = "delta" if self.stream else "message"
        text = "".join((c[field_name].get("content") or "") if self.chat else c["text"] for c in found)
        usage = [event["usage"] for event in parsed if event.get("usage")]
        right = {"prompt_tokens": len(ids), "completion_tokens": self.tokens, "total_tokens": len(ids) + self.tokens}
        expected = expected_text(ids, self.tokens)
        is_right = text == expected and [{n: one[n] for n in right} for one in usage] == [right]
        self.prompt_tokens, self.received = len(ids), self.tokens
        self.outcome = "answered" if is_right else "wrong"
        if not is_right:
            self.detail = f"{text!r}, expected {expected!r}; usage {usage}, expected {right}"


def received_ids(raw: bytes) -> int:
    """The tokens in the complete events of a stream that its client left."""
    events = [one[6:] for one in raw.split(b"\n\n")[:-1] if one.startswith(b"data: {")]
    choices = [choice for event in events for choice in json.loads(event).get("choices", ())]
    return sum(len(choice.get("token_ids") or ()) for choice in choices)


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount a file system of its own; without that right, yield False."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, check=False, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


class World:
    """The processes, and what was sent. ``hold_s`` is the length of a fault."""

    def __init__(self, folder: Path, postgres: Server, seed: int, hold_s: float, *, has_disk: bool) -> None:
        self.folder, self.postgres, self.hold_s, self.has_disk = folder, postgres, hold_s, has_disk
        self.random = random.Random(seed)
        self.stack = AsyncExitStack()
        self.sent: list[Sent] = []
        self.open: set[asyncio.Task[None]] = set()
        self.is_restarting = False
        self.secrets = {"file": "sk-file"}
        self.engines: dict[int, asyncio.subprocess.Process] = {}
        self.max_wait_s = 60
        self.offset = folder / "offset"
        self.problems: list[str] = []
        self.client: Any = None
        self.tasks = 0.0  # of the idle gateway

    async def __aenter__(self) -> Self:
        await self.stack.__aenter__()
        names = ("gateway", "engines")
        self.logs = {n: self.stack.enter_context((self.folder / f"{n}.log").open("ab")) for n in names}
        self.ports = [free_port() for _ in range(ENGINES)]
        self.port, self.admin_port = free_port(), free_port()
        self.store = self.postgres.place("public").replace("&schema=public", "")
        await asyncio.gather(*map(self.start_engine, self.ports))
        self.issue_certificate()
        self.offset.write_text("+0")
        self.write_config()
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the rotation has a check of its own
        self.context = context
        await self.connect()
        self.stack.push_async_callback(lambda: self.client.close())  # noqa: PLW0108 - of a later client
        self.admin = await self.stack.enter_async_context(aiohttp.ClientSession())
        await self.start_gateway()
        for tenant in STORED:
            await self.api("PUT", f"tenants/{tenant}", {"quotas": {"tokens_per_month": 1e12}})
            key = {"tenant": tenant, "priority": TENANTS[tenant]}
            self.secrets[tenant] = (await self.api("POST", "keys", key))["secret"]
        return self

    async def __aexit__(self, *error: object) -> None:
        for process in [*self.engines.values(), self.gateway]:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        await self.stack.__aexit__(None, None, None)

    # Processes:

    async def start_engine(self, port: int) -> None:
        words = f"--port {port} --max-num-seqs {SEQS} --fixed-s {STEP_S} --decode-s 0 --prompt-token-s 0".split()
        command = [sys.executable, "-m", "lengthwise.testing.engine_server", *words]
        pipe = asyncio.subprocess.PIPE
        self.engines[port] = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=self.logs["engines"])
        assert await self.engines[port].stdout.readline(), "the engine did not start"

    async def start_gateway(self) -> None:
        environment = dict(os.environ)
        if FAKETIME is not None:
            environment |= {"LD_PRELOAD": str(FAKETIME), "FAKETIME_TIMESTAMP_FILE": str(self.offset)}
            environment |= {"FAKETIME_DONT_FAKE_MONOTONIC": "1", "FAKETIME_CACHE_DURATION": "1", "NO_FAKE_STAT": "1"}
        command = [str(Path(sys.executable).with_name("lengthwise")), "serve", str(self.folder / "gateway.toml")]
        self.gateway = await asyncio.create_subprocess_exec(
            *command, stdout=self.logs["gateway"], stderr=self.logs["gateway"], env=environment
        )
        async with asyncio.timeout(60):
            while not await self.is_ready():
                assert self.gateway.returncode is None, (self.folder / "gateway.log").read_text()[-2000:]
                await asyncio.sleep(0.1)

    async def connect(self) -> None:
        """Let later requests use new connections."""
        if self.client is not None:
            await self.client.close()
        self.client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, ssl=self.context))

    async def is_ready(self) -> bool:
        with contextlib.suppress(aiohttp.ClientError):
            async with self.client.get(f"https://127.0.0.1:{self.port}/ready") as response:
                return response.status == 200
        return False

    def write_config(self) -> None:
        engines = ", ".join(f'{{url = "http://127.0.0.1:{p}", generation_defaults = "none"}}' for p in self.ports)
        text = CONFIG.format(
            engines=engines, port=self.port, admin_port=self.admin_port, folder=self.folder, disk=self.folder / "disk",
            max_wait_s=self.max_wait_s, stall_s=STALL_S, store=self.store, admin=sha256(ADMIN),
            file_key=sha256(self.secrets["file"]),
        )  # fmt: skip
        (self.folder / "gateway.toml").write_text(text)

    def issue_certificate(self) -> bytes:
        """Write another certificate and its key; return it as it is shown."""
        issued = trustme.CA().issue_cert("127.0.0.1")
        issued.private_key_pem.write_to_path(str(self.folder / "key.pem"))
        issued.cert_chain_pems[0].write_to_path(str(self.folder / "cert.pem"))
        return ssl.PEM_cert_to_DER_cert(issued.cert_chain_pems[0].bytes().decode())

    async def shown_certificate(self) -> bytes:
        _, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=self.context)
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return shown

    async def api(self, method: str, path: str, content: Any = None) -> Any:
        url, headers = f"http://127.0.0.1:{self.admin_port}/admin/{path}", {"Authorization": f"Bearer {ADMIN}"}
        async with self.admin.request(method, url, json=content, headers=headers) as response:
            assert response.status < 300, await response.text()
            return await response.json()

    async def set_faults(self, ports: list[int], always: dict[str, Any] | None) -> None:
        for port in ports:
            async with self.admin.post(f"http://127.0.0.1:{port}/emulator/faults", json={"always": always}) as response:
                assert response.status == 200, await response.text()

    # Load:

    def send(self, tenant: str = "", leave_s: float = math.inf) -> None:
        """Send the next request, of a random kind."""
        draw = self.random
        one = Sent(len(self.sent), tenant or draw.choice(list(TENANTS)), draw.random() < 0.5, draw.random() < 0.7,
                   draw.randint(SHORTEST, LONGEST))  # fmt: skip
        self.sent.append(one)
        if one.tenant == "leaving" and draw.random() < 0.1:
            leave_s = min(leave_s, draw.uniform(0.0, 1.0))
        task = asyncio.ensure_future(self._ask(one, leave_s))
        self.open.add(task)
        task.add_done_callback(self.open.discard)

    async def _ask(self, one: Sent, leave_s: float) -> None:
        path, headers = (
            ("chat/" if one.chat else "") + "completions",
            {"Authorization": f"Bearer {self.secrets[one.tenant]}"},
        )
        raw, response = b"", None
        one.sent_s = time.monotonic()
        try:
            async with asyncio.timeout(min(leave_s, PATIENCE_S)):
                async with self.client.post(
                    f"https://127.0.0.1:{self.port}/v1/{path}", json=one.body(), headers=headers,
                    timeout=aiohttp.ClientTimeout(total=None),
                ) as response:  # fmt: skip
                    async for data in response.content.iter_any():
                        raw += data
                    one.judge(response.status, raw)
        except TimeoutError:
            one.outcome = "left" if leave_s < PATIENCE_S else "no end"
            if response is not None and response.connection is not None:
                response.connection.transport.abort()
            one.received = received_ids(raw) if one.stream and response is not None and response.status == 200 else 0
        except (aiohttp.ClientError, ConnectionError) as error:
            one.outcome = "unsent" if self.is_restarting and not raw else "broken"
            one.detail = f"{error!r} after {len(raw)} bytes"
        one.ended_s = time.monotonic()

    async def load(self, rate_rps: float, until_s: float) -> None:
        """Send requests at random times, in an open loop."""
        due_s = time.monotonic()
        while (due_s := due_s + self.random.expovariate(rate_rps)) < until_s:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            self.send()

    async def capacity(self, seconds: float) -> float:
        """Return the requests per second of as many clients as fill all engines."""
        until_s, before = time.monotonic() + seconds, len(self.sent)
        while time.monotonic() < until_s:
            while len(self.open) < 2 * ENGINES * SEQS:
                self.send()
            await asyncio.wait(self.open, return_when=asyncio.FIRST_COMPLETED)
        answered = sum(one.outcome == "answered" for one in self.sent[before:])
        await self.rest()
        return answered / seconds

    async def rest(self) -> None:
        if self.open:
            await asyncio.wait(self.open)

    # Checks:

    async def metrics(self) -> dict[str, float]:
        async with self.admin.get(f"http://127.0.0.1:{self.admin_port}/metrics") as response:
            lines = re.findall(r"^(\w+) (\S+)$", await response.text(), re.MULTILINE)
        return {name: float(value) for name, value in lines}

    async def at_rest(self) -> dict[str, float]:
        """Return what the idle gateway uses; note a problem if anything is left of a request."""
        left: dict[str, Any] = {}
        for _ in range(300):
            values = await self.metrics()
            tasks = values["lengthwise_tasks"]
            self.tasks = self.tasks or tasks
            left = {"tasks": max(0.0, tasks - self.tasks - SPARE_TASKS)}
            for name in ("queue_requests", "running_requests", "queue_bytes"):
                left[name] = values[f"lengthwise_{name}"]
            for port in self.ports:
                async with self.admin.get(f"http://127.0.0.1:{port}/emulator/log?since=1000000000") as response:
                    log = await response.json()
                left[f"engine {port}"] = log["slots_in_use"] + log["open"]
            usage = (await self.api("GET", "usage?period=month"))["usage"]
            left["reserved tokens"] = sum(row["reserved_tokens"] for row in usage)
            left = {name: value for name, value in left.items() if value}
            if not left:
                break
            await asyncio.sleep(0.1)
        else:
            self.problems.append(f"left after all requests had ended: {left}")
        files = len([*Path(f"/proc/{self.gateway.pid}/fd").iterdir()])  # noqa: ASYNC240 - of the system, not of a disk
        return {"rss_mib": values["process_resident_memory_bytes"] / 2**20, "files": files, "tasks": tasks}

    async def usage_problems(self) -> dict[str, dict[str, Any]]:
        """Compare the ledger with what the clients received, by tenant: exactly where no client left, none failed."""
        found = {}
        for tenant in STORED:
            own = [one for one in self.sent if one.tenant == tenant]
            rows = (await self.api("GET", f"usage?tenant={tenant}&period=month"))["usage"]
            names = ("requests", "prompt_tokens", "output_tokens")
            used = {name: sum(row[name] for row in rows) for name in names}
            answered = [one for one in own if one.outcome == "answered"]
            # A request that failed or was left counts with what its engine had generated, at least what came.
            others = [one for one in own if one.outcome in ("left", "engine_failed", "no_engine")]
            low = sum(one.tokens for one in answered) + sum(one.received for one in others)
            high = sum(one.tokens for one in [*answered, *others])
            prompts = sum(one.prompt_tokens for one in answered)
            is_exact = not others
            is_right = low <= used["output_tokens"] <= high and used["prompt_tokens"] >= prompts
            if is_exact:
                is_right = is_right and used["prompt_tokens"] == prompts and used["requests"] == len(answered)
            received = {"requests": len(answered), "prompt_tokens": prompts, "output_tokens": [low, high]}
            found[tenant] = {"ledger": used, "received": received, "exact": is_exact, "right": is_right}
            if not is_right:
                self.problems.append(f"usage of {tenant}: {found[tenant]}")
        return found


# Faults: each begins, holds and ends in its block.
Fault = Callable[[World], Any]
FAULTS: dict[str, Fault] = {}


def fault(name: str) -> Callable[[Any], Any]:
    def add(work: Any) -> Any:
        FAULTS[name] = asynccontextmanager(work)
        return work

    return add


@fault("engine killed (SIGKILL), then restarted")
async def _kill(world: World) -> AsyncIterator[None]:
    port = world.random.choice(world.ports)
    world.engines[port].kill()
    await world.engines[port].wait()
    yield
    await world.start_engine(port)


@fault("engine hangs (SIGSTOP), then continues")
async def _hang(world: World) -> AsyncIterator[None]:
    process = world.engines[world.random.choice(world.ports)]
    process.send_signal(signal.SIGSTOP)
    yield
    process.send_signal(signal.SIGCONT)


def _engine_fault(name: str, **fields: Any) -> None:
    @fault(name)
    async def work(world: World) -> AsyncIterator[None]:
        ports = [world.random.choice(world.ports)]
        await world.set_faults(ports, fields)
        yield
        await world.set_faults(ports, None)


_engine_fault("engine is slow (0.2 s more a chunk)", kind="slow", seconds=0.2)
_engine_fault("engine sends garbage (events that are no JSON)", kind="malformed", after_tokens=7)
_engine_fault("engine cuts responses off (connection reset)", kind="close", after_tokens=7)
_engine_fault("engine ends streams without [DONE]", kind="no_done")
_engine_fault("engine answers 500", kind="status", status=500)


@fault("clients reset their connections")
async def _reset(world: World) -> AsyncIterator[None]:
    for _ in range(BURST):
        world.send("leaving", leave_s=world.random.uniform(0.01, 1.5))
    yield


@fault("store of tenants down (PostgreSQL crashes), then restarted")
async def _store(world: World) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, world.postgres.crash)
    yield
    await loop.run_in_executor(None, world.postgres.start)


@fault("store of tenants hangs (SIGSTOP), then continues")
async def _store_hangs(world: World) -> AsyncIterator[None]:
    with world.postgres.hanging():
        yield


@fault("clock jumps a day ahead, then back")
async def _clock(world: World) -> AsyncIterator[None]:
    world.offset.write_text("+86400")
    yield
    world.offset.write_text("+0")


@fault("disk full, then free")
async def _disk(world: World) -> AsyncIterator[None]:
    if not world.has_disk:  # a limit of the size of files, for the process alone
        limits = resource.prlimit(world.gateway.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(world.gateway.pid, resource.RLIMIT_FSIZE, (0, limits[1]))
        yield
        resource.prlimit(world.gateway.pid, resource.RLIMIT_FSIZE, limits)
        return
    filler = world.folder / "disk" / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
    yield
    filler.unlink()


@fault("certificate rotated (SIGHUP), a broken one between")
async def _certificate(world: World) -> AsyncIterator[None]:
    before = await world.shown_certificate()
    (world.folder / "cert.pem").write_text("half of a certifica")
    world.gateway.send_signal(signal.SIGHUP)
    yield
    if await world.shown_certificate() != before:
        world.problems.append("a broken certificate replaced a good one")
    issued = world.issue_certificate()
    world.gateway.send_signal(signal.SIGHUP)
    for _ in range(100):
        if await world.shown_certificate() == issued:
            return
        await asyncio.sleep(0.1)
    world.problems.append("the new certificate is not in use 10 s after SIGHUP")


@fault("configuration reloaded (SIGHUP), an invalid one between")
async def _reload(world: World) -> AsyncIterator[None]:
    (world.folder / "gateway.toml").write_text("engines = 3")
    world.gateway.send_signal(signal.SIGHUP)
    yield
    world.max_wait_s += 1
    world.write_config()
    world.gateway.send_signal(signal.SIGHUP)


RESTART = "gateway restarted (SIGTERM)"


@fault(RESTART)
async def _restart(world: World) -> AsyncIterator[None]:
    world.is_restarting = True
    world.gateway.terminate()
    async with asyncio.timeout(40):
        code = await world.gateway.wait()
    if code != 0:
        world.problems.append(f"the gateway ended with exit code {code}")
    await world.start_gateway()
    world.is_restarting = False
    yield


@dataclass
class Period:
    """What one fault did. Times are seconds on the monotonic clock."""

    kind: str
    start_s: float
    end_s: float
    first: int
    last: int  # numbers of its requests
    at_rest: dict[str, float] = field(default_factory=dict)


async def run(world: World, kinds: list[str], period_s: float, load: float) -> tuple[float, list[Period]]:
    """Run one period for each kind of fault; return the rate of requests and the periods."""
    await world.capacity(min(3.0, period_s / 4))  # connections and limits of concurrency settle
    rate_rps = load * await world.capacity(min(15.0, period_s))
    periods = []
    for number, kind in enumerate(kinds):
        began_s, first = time.monotonic(), len(world.sent)
        loading = asyncio.ensure_future(world.load(rate_rps, began_s + 0.85 * period_s))
        await asyncio.sleep(0.2 * period_s)
        for _ in range(BURST):
            world.send(world.random.choice(("steady", "batch", "file")))
        await asyncio.sleep(0.15)
        start_s = time.monotonic()
        async with FAULTS[kind](world):
            await asyncio.sleep(world.hold_s if kind != RESTART else 0.0)
        end_s = time.monotonic()
        await loading
        await world.rest()
        await world.connect()
        await asyncio.sleep(min(1.0, period_s / 20))  # the gateway notices that connections are closed
        one = Period(kind, start_s, end_s, first, len(world.sent), await world.at_rest())
        if world.gateway.returncode is not None:
            world.problems.append(f"the gateway ended ({world.gateway.returncode}) in: {kind}")
            break
        periods.append(one)
        outcomes = dict(Counter(sent.outcome for sent in world.sent[first:]))
        print(f"{number + 1}/{len(kinds)} {kind}: {outcomes} {one.at_rest} {world.problems[-1:]}", file=sys.stderr)
        await asyncio.sleep(max(0.0, began_s + period_s - time.monotonic()))
    return rate_rps, periods


def slope(values: list[float], hours: list[float]) -> dict[str, Any]:
    """Return the growth an hour by least squares, with a 95 % interval that allows for correlated residuals."""
    if len(values) < 8:
        return {"per_hour": None, "last": values[-1] if values else None}
    x, y = np.array(hours) - np.mean(hours), np.array(values)
    growth = float(x @ y / (x @ x))
    residuals = y - y.mean() - growth * x
    spread = float(residuals @ residuals)
    r = max(0.0, float(residuals[1:] @ residuals[:-1]) / spread) if spread else 0.0
    effective = max(4.0, len(y) * (1 - r) / (1 + r))
    half = t_quantile(0.95, int(effective) - 2) * math.sqrt(spread / (effective - 2) / (x @ x) * len(y) / effective)
    return {"per_hour": growth, "ci": [growth - half, growth + half], "first": values[0], "last": values[-1]}


def fault_table(world: World, periods: list[Period], rows: list[Row]) -> list[dict[str, Any]]:
    """Return, for each kind of fault, what became of requests at engines, waiting ones and new ones, and the delay."""
    shift_s = time.time() - time.monotonic()  # the journal has seconds since 1970
    found = []
    for kind in FAULTS:
        own = [one for one in periods if one.kind == kind]
        counts = {name: Counter[str]() for name in ("at_engines", "waiting", "new")}
        recovered = []
        for one in own:
            at_s, moved = one.start_s + shift_s, 0
            for row in rows:
                if row.arrival_s <= at_s < row.finished_s:
                    state = "at_engines" if row.dispatched_s <= at_s else "waiting"
                    counts[state][ENDS.get(row.outcome, row.outcome)] += 1
                    moved = row.failovers if state == "at_engines" else 0
                    counts[state]["moved to another engine"] += moved > 0
            new = [sent for sent in world.sent[one.first : one.last] if one.start_s <= sent.sent_s < one.end_s]
            counts["new"].update(ENDS.get(sent.outcome, sent.outcome) for sent in new)
            later = [sent for sent in world.sent[one.first : one.last] if sent.sent_s >= one.start_s]
            disturbed = [s.sent_s for s in later if s.outcome not in ("answered", "left") or s.delay_s > SLOW_S]
            recovered.append(max(disturbed, default=one.start_s) - one.start_s)
        if own:
            held_s = [one.end_s - one.start_s for one in own]
            found.append({"fault": kind, "times": len(own), "held_s": statistics.median(held_s),
                          **{name: {k: n for k, n in count.items() if n} for name, count in counts.items()},
                          "recovered_s": [statistics.median(recovered), max(recovered)]})  # fmt: skip
    return found


def summarize(world: World, rate_rps: float, periods: list[Period], rows: list[Row]) -> dict[str, Any]:
    lost = [one for one in world.sent if one.lost]
    restarts = [i for i, one in enumerate(periods) if one.kind == RESTART]
    steady = periods[max(restarts[-1] + 1 if restarts else 0, len(periods) // 6) :]
    hours = [one.end_s / 3600 for one in steady]
    logged = (world.folder / "gateway.log").read_text()
    if count := logged.count("Traceback"):
        world.problems.append(f"{count} tracebacks in the log: {logged[logged.index('Traceback') :][:1500]}")
    return {
        "lost": len(lost),
        "lost_requests": [vars(one) for one in lost[:10]],
        "problems": world.problems,
        "requests": len(world.sent),
        "outcomes": dict(Counter(one.outcome for one in world.sent)),
        "rate_rps": rate_rps,
        "periods": len(periods),
        "growth": {n: slope([one.at_rest[n] for one in steady], hours) for n in ("rss_mib", "files", "tasks")},
        "faults": fault_table(world, periods, rows),
    }


async def endure(folder: Path, postgres: Server, args: argparse.Namespace, *, has_disk: bool) -> dict[str, Any]:
    period_s = args.period_s
    count = max(1, round(args.minutes * 60 / period_s))
    usable = [one for one in FAULTS if one != RESTART and (FAKETIME is not None or "clock" not in one)]
    order = random.Random(args.seed)
    rounds = (order.sample(usable, len(usable)) for _ in itertools.count())
    kinds = [RESTART, *itertools.islice(itertools.chain.from_iterable(rounds), count - 1)]
    async with World(folder, postgres, args.seed, period_s / 4, has_disk=has_disk) as world:
        rate_rps, periods = await run(world, kinds, period_s, LOAD)
        usage = await world.usage_problems()
        world.gateway.terminate()
        await world.gateway.wait()
        rows = [row for _, row in read_all(folder / "disk" / "journal.jsonl")]
        finished = Counter(row.tenant for row in rows if row.outcome == "finished")
        for tenant in ("steady", "batch", "file"):
            answered = sum(one.tenant == tenant and one.outcome == "answered" for one in world.sent)
            if finished[tenant] != answered:
                world.problems.append(f"the journal has {finished[tenant]} of {answered} answers of {tenant}")
        return summarize(world, rate_rps, periods, rows) | {"usage": usage, "seed": args.seed, "period_s": period_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--period-s", type=float, default=60.0, help="time from one fault to the next")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for the logs")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that its processes end too
    with tempfile.TemporaryDirectory() as name, small_disk(Path(name) / "disk") as has_disk:
        postgres = Server(programs(), Path(name))
        try:
            found = asyncio.run(endure(Path(name), postgres, args, has_disk=has_disk))
        finally:
            postgres.stop()
            if args.keep:
                args.keep.mkdir(exist_ok=True)
                for file in Path(name).glob("*.log"):
                    shutil.copy(file, args.keep)
    print(json.dumps(found))
    sys.exit(bool(found["lost"] or found["problems"]))


if __name__ == "__main__":
    main()
