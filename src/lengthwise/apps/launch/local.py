"""Engines as processes on this machine, and engines that already run."""

from __future__ import annotations

import asyncio
import contextlib
import math
import shlex
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from lengthwise.apps.app import require_one_text
from lengthwise.apps.launch.engine import Engine, HttpEngine, Launcher
from lengthwise.backend import Launch, process, vllm_launch
from lengthwise.backend.openai_protocol import Server
from lengthwise.schema.app import ModelPlan, Replica
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import EngineError, InputError, InternalError, OutputError, UnknownNameError

HOST = "127.0.0.1"
GIVEN_GPU = "given"  # GPU type in the plans of engines that already run
_SLEEP_S, _WAKE_S = 60.0, 300.0
_MAX_STARTS = 3
# Words of lengthwise, Python and llama.cpp.
_PORT_TAKEN = ("must be free", "address already in use", "couldn't bind")

Deployed = Callable[[ModelPlan], Deployment]  # returns the deployment of a plan, for vLLM's command


@dataclass(frozen=True)
class EngineConfig:
    """Configuration of a model's engines: what they load, how they start, and what requests to them contain."""

    name: str  # name of the model in the application
    # Hugging Face id or folder of the weights. None means the catalog's weights of the plan's model.
    weights: str | None = None
    served: str = ""  # name of the model in requests. "" means the first model that the engine lists
    # Command that starts an engine. "" means vLLM's. Placeholders are ``{weights}``, ``{name}``, ``{host}``,
    # ``{port}``, ``{tp}``, ``{pp}``, ``{gpus}`` and ``{max_model_len}``.
    command: str = ""
    # environment variables in addition to those of this process
    environment: Mapping[str, str] = field(default_factory=dict)
    max_num_seqs: int = 256  # concurrent requests of a replica that has its own ``command`` or no planned deployment
    max_model_len: int | None = None  # value of ``{max_model_len}`` in ``command``
    # Whether engines are put to sleep when they are not needed, by ``/sleep`` and ``/wake_up`` of vLLM's development
    # mode (CUDA, ROCm, XPU). If ``/sleep`` fails, the engine is stopped instead. vLLM's CPU build refuses to start with
    # ``--enable-sleep-mode`` ("Sleep mode is not supported on current platform", 0.32).
    sleeps: bool = False
    body: Mapping[str, object] = field(default_factory=dict)  # additional fields of every request

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise InputError(f"max_num_seqs of {self.name} must be at least 1; it is {self.max_num_seqs}")
        require_one_text(self.body, "body")
        if self.command:
            self._own_command(ModelPlan(0, ""), (0,), HOST, 1)

    def launch(self, plan: ModelPlan, gpus: Replica, host: str, port: int, deployed: Deployed | None) -> Launch:
        """Return the command that starts a replica on a port.

        ``gpus`` are numbered as in ``CUDA_VISIBLE_DEVICES``. Without ``command``, it is vLLM's for ``deployed(plan)``.
        Raises InputError if there is neither a ``command`` nor ``deployed``.
        """
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), **self.environment}
        if self.command:
            return Launch(self._own_command(plan, gpus, host, port), environment)
        if deployed is None:
            raise InputError(f"{self.name} must have a command that starts its engine, or a planned deployment")
        planned = deployed(plan)  # as if every layer cached all tokens; the engine may do better
        planned = replace(planned, scheduler=replace(planned.scheduler, hybrid_kv_cache=True))
        launch = vllm_launch(planned, model=self.weights, served_name=self.served or None, host=host, port=port)
        command, mode = launch.command, {}
        if self.sleeps:
            command, mode = (*command, "--enable-sleep-mode"), {"VLLM_SERVER_DEV_MODE": "1"}
        return Launch(command, {**launch.environment, **mode, **environment}, launch.notes)

    def concurrency(self, plan: ModelPlan, deployed: Deployed | None) -> int:
        """Return the maximum number of concurrent requests of a replica."""
        if self.command or deployed is None:
            return self.max_num_seqs
        return deployed(plan).limits.max_num_seqs

    def _own_command(self, plan: ModelPlan, gpus: Sequence[int], host: str, port: int) -> tuple[str, ...]:
        values = {
            "weights": self.weights or self.name,
            "name": self.served or self.name,
            "host": host,
            "port": port,
            "tp": plan.tp,
            "pp": plan.pp,
            "gpus": ",".join(map(str, gpus)),
            "max_model_len": self.max_model_len or "",
        }
        try:
            return tuple(word.format(**values) for word in shlex.split(self.command))
        except KeyError as error:
            raise UnknownNameError(f"placeholder in the command of {self.name}", error.args[0], values) from None
        except (ValueError, IndexError) as error:
            raise InputError(
                f"the command of {self.name} cannot be read ({error}); write placeholders as {{port}}, braces as "
                f"{{{{ }}}}: {self.command!r}"
            ) from None


class _CancelledError(Exception):
    """The start of a process was cancelled."""


class Process:
    """The process of an engine. ``launch`` returns the command that starts the engine on a given port of ``host``."""

    def __init__(
        self, launch: Callable[[int], Launch], log_path: Path, limits: EngineTimeouts, host: str = HOST
    ) -> None:
        self._launch, self._log_path, self._limits, self._host = launch, log_path, limits, host
        self._cancel, self._ending, self._kill = threading.Event(), False, False
        self._stack = ExitStack()
        self.local: process.LocalEngine | None = None

    @property
    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return self.local is not None and self.local.is_alive

    async def start(self, threads: Executor) -> str:
        """Start the process, and return the address once the engine is ready. Cancelling the call ends the process.

        Raises:
            EngineError: The process exited or was not ready in time. The message has the last lines of its log.
        """
        loop = asyncio.get_running_loop()
        starting = loop.run_in_executor(threads, self.start_blocking)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            self.cancel_start()
            with contextlib.suppress(_CancelledError, EngineError):
                await starting
            await loop.run_in_executor(threads, self.stop_blocking)
            raise

    def start_blocking(self) -> str:
        """Start the process, and return the address once the engine is ready. This blocks the calling thread."""
        for attempt in range(1, _MAX_STARTS + 1):
            if self._cancel.is_set():
                raise _CancelledError
            try:
                with process.reserved_port(self._host) as port:
                    launch = self._launch(port)
                    engine = process.local_engine(
                        launch.command,
                        port=port,
                        log_path=self._log_path,
                        env=launch.environment,
                        host=self._host,
                        ready_s=self._limits.ready_s,
                        grace_s=self._limits.grace_s,
                        now=self._now,
                        pause=self._pause,
                    )
                    self.local = self._stack.enter_context(engine)
                    return self.local.url
            except EngineError as error:
                # A program that reserves no ports can take the port while the engine starts.
                if attempt == _MAX_STARTS or not any(words in str(error).lower() for words in _PORT_TAKEN):
                    raise
        raise InternalError("a start ends in an address or an error")

    def cancel_start(self) -> None:
        """Cancel a start that runs in another thread or has not started yet."""
        self._cancel.set()

    def stop_blocking(self, *, at_once: bool = False) -> None:
        """End the process, or clean up if it has ended. ``at_once`` kills it. This blocks the calling thread."""
        self._cancel.set()
        self._ending = True
        if at_once:
            self.force_stop()
        self._stack.close()

    def force_stop(self) -> None:
        """Make every thread that ends the process, now or later, kill it instead of waiting for its end."""
        self._kill = True

    def _now(self) -> float:
        """Return the seconds on the clock of the time limits: infinity, past all limits, once the process must die."""
        return math.inf if self._kill and self._cancel.is_set() else time.monotonic()

    def _pause(self, seconds: float) -> None:
        """Sleep. Raise _CancelledError if the start is cancelled; pauses while the process then ends do not raise."""
        if self._ending or self.local is not None:
            time.sleep(seconds)
        elif self._cancel.wait(seconds):
            self._ending = True
            raise _CancelledError


@dataclass(frozen=True)
class EngineTimeouts:
    """Time limits of engines, in seconds."""

    ready_s: float = process.READY_S  # from the start of an engine until it is ready
    grace_s: float = process.GRACE_S  # from SIGTERM until an engine that has not exited is killed
    stall_s: float = 120.0  # longest time without a byte of an answer, including the wait for the first one
    request_s: float = 3600.0  # from the start of a request until its end

    def server(self, url: str, config: EngineConfig) -> Server:
        """Return the address, time limits and fields with which the client sends requests to an engine."""
        return Server(url, config.served or None, stall_s=self.stall_s, timeout_s=self.request_s, body=config.body)


DEFAULT = EngineTimeouts()


async def connect(engine: HttpEngine, end: Callable[[], Awaitable[None]]) -> None:
    """Connect to a started engine. If this fails, call ``end`` and raise the error (EngineError)."""
    try:
        await engine.open()
    except BaseException:
        await end()
        raise


@dataclass
class LocalLauncher(Launcher):
    """Starts a process for each replica. The process sees only the replica's GPUs.

    The engines end when this Python process ends, even if it is killed.
    """

    models: Sequence[EngineConfig]  # configuration of each model's engines, by model number
    logs: Path  # folder of the engines' logs
    deployed: Deployed | None = None  # returns the deployment of a plan, from which vLLM's command follows
    timeouts: EngineTimeouts = DEFAULT
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(64), init=False)
    running: dict[int, tuple[HttpEngine, Process, EngineConfig]] = field(default_factory=dict, init=False)
    _processes: set[Process] = field(default_factory=set, init=False)
    _numbers: count[int] = field(default_factory=lambda: count(1), init=False)
    _kill: bool = field(default=False, init=False)

    async def start(self, plan: ModelPlan, gpus: Replica) -> Engine:
        """Start the process of a replica on these GPUs, and return the engine once it is ready."""
        config = self.models[plan.model]
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot write logs to {self.logs}: {error.strerror or error}") from error
        process = Process(
            lambda port: config.launch(plan, gpus, HOST, port, self.deployed),
            self.logs / f"{slug(config.name)}-{next(self._numbers)}.log",
            self.timeouts,
        )
        self._processes.add(process)  # from before its start until after its end, for ``force_stop``
        try:
            url = await process.start(self._threads)
        except BaseException:
            self._processes.discard(process)
            raise
        server, limit = self.timeouts.server(url, config), config.concurrency(plan, self.deployed)
        engine = HttpEngine(server, limit, lambda: process.is_alive)
        await connect(engine, lambda: self._end(process))
        self.running[id(engine)] = (engine, process, config)
        return engine

    async def stop(self, engine: Engine) -> None:
        """End an engine and its processes."""
        found = self.running.pop(id(engine), None)
        if found is not None:
            await found[0].close()
            await self._end(found[1])

    async def _end(self, process: Process) -> None:
        def end() -> None:
            process.stop_blocking(at_once=self._kill)

        # A cancelled caller must not leave the process half ended.
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._threads, end))
        self._processes.discard(process)

    async def sleep(self, engine: Engine) -> bool:
        """Put an engine to sleep, with its weights in host memory. Return whether this succeeded."""
        found = self.running.get(id(engine))
        return bool(found and found[2].sleeps and await found[0].post("/sleep?level=1", _SLEEP_S))

    async def wake(self, engine: Engine) -> None:
        """Make a sleeping engine ready again."""
        found = self.running.get(id(engine))
        if found is None or not await found[0].post("/wake_up", _WAKE_S):
            raise EngineError(f"{engine.description} did not wake up; see its log in {self.logs}")

    def force_stop(self) -> None:
        """Kill all engines, now and later, including starting and ending engines."""
        self._kill = True
        for starting in list(self._processes):
            starting.force_stop()
            if starting.local is not None and starting.is_alive:
                starting.local.process.kill()

    async def close(self) -> None:
        """End all engines."""
        await asyncio.gather(*(self.stop(engine) for engine, _, _ in list(self.running.values())))
        self._threads.shutdown(wait=False)


def slug(name: str) -> str:
    """Return a file name for a name: all characters but letters, digits, ``-``, ``.`` and ``_`` become ``_``."""
    return "".join(c if c.isalnum() or c in "-._" else "_" for c in name)


@dataclass
class StaticLauncher(Launcher):
    """Connects to engines that already run. ``urls`` holds the addresses of each model's engines, by model number."""

    models: Sequence[EngineConfig]
    urls: Mapping[int, Sequence[str]]
    timeouts: EngineTimeouts = DEFAULT
    _open: dict[int, HttpEngine] = field(default_factory=dict, init=False)
    is_placed = False

    def __post_init__(self) -> None:
        missing = [config.name for number, config in enumerate(self.models) if not self.urls.get(number)]
        if missing:
            raise InputError(f"every model must have an address of an engine; there is none for {', '.join(missing)}")

    def plans(self) -> tuple[ModelPlan, ...]:
        """Return a plan for each model, with one replica per address."""
        return tuple(ModelPlan(number, GIVEN_GPU, dp=len(self.urls[number])) for number in range(len(self.models)))

    async def start(self, plan: ModelPlan, gpus: Replica) -> Engine:
        """Connect to the replica whose number is ``gpus[0]``."""
        config, urls = self.models[plan.model], self.urls[plan.model]
        if gpus[0] >= len(urls):
            raise EngineError(f"{config.name} has {len(urls)} engines; replica {gpus[0] + 1} was requested")
        engine = HttpEngine(self.timeouts.server(urls[gpus[0]], config), config.max_num_seqs)
        await engine.open()
        self._open[id(engine)] = engine
        return engine

    async def stop(self, engine: Engine) -> None:
        """Close the connections to an engine."""
        found = self._open.pop(id(engine), None)
        if found is not None:
            await found.close()

    async def close(self) -> None:
        """Close all connections."""
        for engine in list(self._open.values()):
            await self.stop(engine)
