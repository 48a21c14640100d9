"""Engines as processes of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import math
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from lengthwise.apps.app import require_one_answer
from lengthwise.apps.launch.engine import Engine, HttpEngine
from lengthwise.backend import Launch, process, vllm_launch
from lengthwise.backend.openai_protocol import Server
from lengthwise.schema.app import ModelPlan, Replica
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import EngineError, InputError, InternalError, OutputError, UnknownNameError

PLACES = ("weights", "name", "host", "port", "tp", "pp", "gpus", "max_model_len")


@dataclass(frozen=True)
class EngineSpec:
    """What an engine of a model loads, and how it is started and asked.

    Attributes:
        name: As the application calls it.
        weights: A Hugging Face id or a folder; None: what the catalog knows of the plan's model.
        served: The name that requests ask for; "": the first that the engine lists.
        command: A command of one's own with ``{weights}``, ``{port}`` and the other PLACES; "": vLLM's for the plan.
        environment: Variables on top of this process' own.
        max_num_seqs: Requests under way at once in a replica, where the plan's deployment does not say.
        max_model_len: For the command.
        sleeps: Whether its engines have ``/sleep`` and ``/wake_up``: vLLM in development mode, on CUDA, ROCm, XPU. Its
            CPU build takes ``--enable-sleep-mode`` and then refuses to start ("Sleep mode is not supported on current
            platform", 0.32): leave it out there, and engines are started anew. So are those whose ``/sleep`` fails.
        body: Fields of every request besides its own.
    """

    name: str
    weights: str | None = None
    served: str = ""
    command: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    max_num_seqs: int = 256
    max_model_len: int | None = None
    sleeps: bool = False
    body: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise InputError(f"seats of {self.name} must be at least 1; it is {self.max_num_seqs}")
        require_one_answer(self.body, "body")
        if self.command:
            _filled(self, ModelPlan(0, ""), (0,), "127.0.0.1", 1)


Deployed = Callable[[ModelPlan], Deployment]


def launch_of(
    loaded: EngineSpec, plan: ModelPlan, gpus: Replica, host: str, port: int, deployed: Deployed | None
) -> Launch:
    """The command of one replica that listens at a port, on GPUs by their number in its machine.

    Args:
        loaded: The model's.
        plan: The replica's.
        gpus: The replica's, as ``CUDA_VISIBLE_DEVICES`` counts them.
        host: Address to listen at.
        port: Where to listen.
        deployed: What was planned, for vLLM's command.

    Raises:
        InputError: There is neither a command nor a deployment.
    """
    seen = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), **loaded.environment}
    if loaded.command:
        return Launch(_filled(loaded, plan, gpus, host, port), seen)
    if deployed is None:
        raise InputError(f"{loaded.name} must have a command that starts its engine, or be planned with one")
    launch = vllm_launch(deployed(plan), model=loaded.weights, served_name=loaded.served or None, host=host, port=port)
    words = (*launch.command, "--enable-sleep-mode") if loaded.sleeps else launch.command
    mode = {"VLLM_SERVER_DEV_MODE": "1"} if loaded.sleeps else {}
    return Launch(words, {**launch.environment, **mode, **seen}, launch.notes)


def max_num_seqs_of(loaded: EngineSpec, plan: ModelPlan, deployed: Deployed | None) -> int:
    """Requests under way at once in one replica."""
    if loaded.command or deployed is None:
        return loaded.max_num_seqs
    return deployed(plan).limits.max_num_seqs


def _filled(loaded: EngineSpec, plan: ModelPlan, gpus: Sequence[int], host: str, port: int) -> tuple[str, ...]:
    values = {
        "weights": loaded.weights or loaded.name,
        "name": loaded.served or loaded.name,
        "host": host,
        "port": port,
        "tp": plan.tp,
        "pp": plan.pp,
        "gpus": ",".join(map(str, gpus)),
        "max_model_len": loaded.max_model_len or "",
    }
    try:
        return tuple(word.format(**values) for word in shlex.split(loaded.command))
    except KeyError as error:
        raise UnknownNameError(f"place in the command of {loaded.name}", str(error.args[0]), PLACES) from None
    except (ValueError, IndexError) as error:
        raise InputError(
            f"the command of {loaded.name} cannot be read ({error}); places are written {{port}}, braces {{{{ }}}}: "
            f"{loaded.command!r}"
        ) from None


_MAX_ATTEMPTS = 3
_TAKEN = "must be free"
READY_S, GRACE_S = process.READY_S, process.GRACE_S


class _HaltedError(Exception):
    """The start was called off."""


class Process:
    """An engine's process.

    Args:
        launch: What to run, by the port that it is to listen at.
        log_path: For what it prints.
        ready_s: How long it may take until it is ready.
        grace_s: How long it may take to end when asked to.
        host: Where it listens.
    """

    def __init__(
        self,
        launch: Callable[[int], Launch],
        log_path: Path,
        *,
        ready_s: float = READY_S,
        grace_s: float = GRACE_S,
        host: str = "127.0.0.1",
    ) -> None:
        self._launch, self._log_path, self._host = launch, log_path, host
        self._ready_s, self._grace_s = ready_s, grace_s
        self._halt, self._heeded, self._hurried = threading.Event(), False, False
        self._stack = ExitStack()
        self.local: process.LocalEngine | None = None

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.local is not None and self.local.is_alive

    async def start(self, threads: Executor) -> str:
        """Its address, once it is ready; called off, it is ended before that is told.

        Raises:
            EngineError: It ended, or was not ready in time; with its last lines.
        """
        starting = asyncio.get_running_loop().run_in_executor(threads, self.start_here)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            self.call_off()
            with contextlib.suppress(_HaltedError, EngineError):
                await starting
            await asyncio.get_running_loop().run_in_executor(threads, self.stop_here)
            raise

    def start_here(self) -> str:
        """The same, holding up the thread."""
        for tries in range(1, _MAX_ATTEMPTS + 1):
            if self._halt.is_set():
                raise _HaltedError
            try:
                self.local = self._stack.enter_context(self._run(process.free_port(self._host)))
            except EngineError as error:
                # Between being found free and being listened at, a port can be taken by another.
                if tries == _MAX_ATTEMPTS or _TAKEN not in str(error):
                    raise
            else:
                return self.local.url
        raise InternalError("a start ends in an address or an error")

    def call_off(self) -> None:
        """A start, under way in another thread or to come, ends."""
        self._halt.set()

    def stop_here(self, *, at_once: bool = False) -> None:
        """Ends it, holding up the thread; what has ended already is cleared away."""
        self._halt.set()
        self._heeded = True
        if at_once:
            self.hurry()
        self._stack.close()

    def hurry(self) -> None:
        """Whoever ends it, now or later and in whatever thread, waits for nothing any more: it is killed."""
        self._hurried = True

    def _run(self, port: int) -> contextlib.AbstractContextManager[process.LocalEngine]:
        launch = self._launch(port)
        return process.local_engine(
            launch.command,
            port=port,
            log_path=self._log_path,
            env=launch.environment,
            host=self._host,
            ready_s=self._ready_s,
            grace_s=self._grace_s,
            now=self._now,
            pause=self._pause,
        )

    def _now(self) -> float:
        """Seconds; of a hurried end all that was granted has passed."""
        return math.inf if self._hurried and self._halt.is_set() else time.monotonic()

    def _pause(self, seconds: float) -> None:
        """ModelDependencies while it starts, unless nobody wants it any more; once that is heeded it is being ended."""
        if self._heeded or self.local is not None:
            time.sleep(seconds)
        elif self._halt.wait(seconds):
            self._heeded = True
            raise _HaltedError


HOST = "127.0.0.1"
_SLEEP_S, _WAKE_S = 60.0, 300.0


@dataclass(frozen=True)
class EngineTimeouts:
    """How long engines may take, in seconds.

    Attributes:
        ready_s: From its start until it is ready.
        grace_s: To end when asked to, before it is killed.
        stall_s: Without a byte of an answer.
        request_s: For a whole request.
    """

    ready_s: float = READY_S
    grace_s: float = GRACE_S
    stall_s: float = 120.0
    request_s: float = 3600.0

    def server(self, url: str, loaded: EngineSpec) -> Server:
        """How an engine of the model is asked."""
        return Server(url, loaded.served or None, stall_s=self.stall_s, timeout_s=self.request_s, body=loaded.body)


DEFAULT = EngineTimeouts()


@dataclass
class LocalLauncher:
    """Starts a process a replica, which sees the GPUs of its placement alone.

    If this process dies, however, its engines end with it.

    Attributes:
        models: What to load, by the models' numbers.
        logs: Folder of the engines' logs.
        deployed: What was planned, where vLLM's command is to be made.
        timeouts: How long engines may take.
    """

    models: Sequence[EngineSpec]
    logs: Path
    deployed: Deployed | None = None
    timeouts: EngineTimeouts = DEFAULT
    is_placed: bool = True
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(64), init=False)
    _running: dict[int, tuple[HttpEngine, Process, EngineSpec]] = field(default_factory=dict, init=False)
    _present: set[Process] = field(default_factory=set, init=False)
    _numbers: count[int] = field(default_factory=lambda: count(1), init=False)
    _hurries: bool = field(default=False, init=False)

    async def start(self, plan: ModelPlan, gpus: Replica) -> Engine:
        """A replica as a process; raises EngineError."""
        process = Process(
            lambda port: launch_of(self.models[plan.model], plan, gpus, HOST, port, self.deployed),
            self._log(plan),
            ready_s=self.timeouts.ready_s,
            grace_s=self.timeouts.grace_s,
        )
        self._present.add(process)  # from its start to its end: whoever has no patience meets it anywhere
        try:
            url = await process.start(self._threads)
        except BaseException:
            self._present.discard(process)
            raise
        loaded = self.models[plan.model]
        engine = HttpEngine(
            self.timeouts.server(url, loaded), max_num_seqs_of(loaded, plan, self.deployed), lambda: process.is_alive
        )
        try:
            await engine.open()
        except BaseException:
            await self._finished(process)
            raise
        self._running[id(engine)] = (engine, process, loaded)
        return engine

    def _log(self, plan: ModelPlan) -> Path:
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot write logs to {self.logs}: {error.strerror or error}") from error
        return self.logs / f"{safe(self.models[plan.model].name)}-{next(self._numbers)}.log"

    async def stop(self, engine: Engine) -> None:
        """Ends it and all it started."""
        found = self._running.pop(id(engine), None)
        if found is not None:
            await found[0].close()
            await self._finished(found[1])

    async def _finished(self, process: Process) -> None:
        def end() -> None:
            process.stop_here(at_once=self._hurries)

        # An engine that is being ended is ended, whoever loses patience meanwhile.
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._threads, end))
        self._present.discard(process)

    async def sleep(self, engine: Engine) -> bool:
        """Whether it sleeps now: its weights wait in the host's memory."""
        found = self._running.get(id(engine))
        return bool(found and found[2].sleeps and await found[0].post("/sleep?level=1", _SLEEP_S))

    async def wake(self, engine: Engine) -> None:
        """Makes it ready again; raises EngineError."""
        found = self._running.get(id(engine))
        if found is None or not await found[0].post("/wake_up", _WAKE_S):
            raise EngineError(f"{engine.description} did not wake up; see its log in {self.logs}")

    def hurry(self) -> None:
        """Engines are killed from now on: those that run, that are being started, and that are being ended."""
        self._hurries = True
        for started in list(self._present):
            started.hurry()
            if started.local is not None and started.is_alive:
                started.local.process.kill()

    async def close(self) -> None:
        """Ends all."""
        await asyncio.gather(*(self.stop(engine) for engine, _, _ in list(self._running.values())))
        self._threads.shutdown(wait=False)


def safe(name: str) -> str:
    """A name as a part of a file's name."""
    return "".join(c if c.isalnum() or c in "-._" else "_" for c in name)


KIND = "given"
"""Stands for the kind of GPU of engines about whose GPUs nobody knows."""


@dataclass
class StaticLauncher:
    """Asks engines that are there; they are neither started nor stopped.

    Attributes:
        models: How they are asked, by the models' numbers.
        urls: Addresses by the models' numbers, a replica each.
        timeouts: How long they may take.
    """

    models: Sequence[EngineSpec]
    urls: Mapping[int, Sequence[str]]
    timeouts: EngineTimeouts = DEFAULT
    is_placed: bool = False
    _open: list[HttpEngine] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        lacking = [one.name for number, one in enumerate(self.models) if not self.urls.get(number)]
        if lacking:
            raise InputError(f"every model must have an address of an engine; there is none for {', '.join(lacking)}")

    def plans(self) -> tuple[ModelPlan, ...]:
        """All models at once, as many replicas each as there are addresses."""
        return tuple(ModelPlan(number, KIND, dp=len(self.urls[number])) for number in range(len(self.models)))

    async def start(self, plan: ModelPlan, gpus: Replica) -> Engine:
        """Connects to the replica of this number; raises EngineError."""
        loaded, urls = self.models[plan.model], self.urls[plan.model]
        if gpus[0] >= len(urls):
            raise EngineError(f"{loaded.name} has {len(urls)} engines; a replica {gpus[0] + 1} was asked for")
        engine = HttpEngine(self.timeouts.server(urls[gpus[0]], loaded), loaded.max_num_seqs)
        await engine.open()
        self._open.append(engine)
        return engine

    async def stop(self, engine: Engine) -> None:
        """Closes the connections to it."""
        found = next((one for one in self._open if one is engine), None)
        if found is not None:
            self._open.remove(found)
            await found.close()

    async def sleep(self, engine: Engine) -> bool:  # noqa: ARG002 - the contract's
        """It goes on for others."""
        return False

    async def wake(self, engine: Engine) -> None:
        """Never asked for: none of them sleeps."""
        raise EngineError(f"{engine.description} was never put to sleep")

    def hurry(self) -> None:
        """There is nothing to end."""

    async def close(self) -> None:
        """Closes all connections."""
        for engine in list(self._open):
            await self.stop(engine)
