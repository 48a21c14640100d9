"""Engines as processes of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from lengthwise.apps.launch._process import GRACE_S, READY_S, Process
from lengthwise.apps.launch.commands import Deployed, Loaded, launch_of, seats_of
from lengthwise.apps.launch.contracts import Engine
from lengthwise.apps.launch.http import HttpEngine
from lengthwise.backend.openai import Server
from lengthwise.schema.app import ModelPlan, Replica
from lengthwise.schema.errors import EngineError, OutputError

HOST = "127.0.0.1"
_SLEEP_S, _WAKE_S = 60.0, 300.0


@dataclass(frozen=True)
class Patience:
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

    def server(self, url: str, loaded: Loaded) -> Server:
        """How an engine of the model is asked."""
        return Server(
            url,
            loaded.served or None,
            stall_s=self.stall_s,
            timeout_s=self.request_s,
            body=loaded.body,
        )


USUAL = Patience()


@dataclass
class LocalLauncher:
    """Starts a process a replica, which sees the GPUs of its placement alone.

    If this process dies, however, its engines end with it.

    Attributes:
        models: What to load, by the models' numbers.
        logs: Folder of the engines' logs.
        deployed: What was planned, where vLLM's command is to be made.
        patience: How long engines may take.
    """

    models: Sequence[Loaded]
    logs: Path
    deployed: Deployed | None = None
    patience: Patience = USUAL
    is_placed: bool = True
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(64), init=False)
    _running: dict[int, tuple[HttpEngine, Process, Loaded]] = field(default_factory=dict, init=False)
    _there: set[Process] = field(default_factory=set, init=False)
    _numbers: count[int] = field(default_factory=lambda: count(1), init=False)
    _hurries: bool = field(default=False, init=False)

    async def start(self, plan: ModelPlan, gpus: Replica) -> Engine:
        """A replica as a process; raises EngineError."""
        process = Process(
            lambda port: launch_of(self.models[plan.model], plan, gpus, HOST, port, self.deployed),
            self._log(plan),
            ready_s=self.patience.ready_s,
            grace_s=self.patience.grace_s,
        )
        self._there.add(process)  # from its start to its end: whoever has no patience meets it anywhere
        try:
            url = await process.start(self._threads)
        except BaseException:
            self._there.discard(process)
            raise
        loaded = self.models[plan.model]
        engine = HttpEngine(
            self.patience.server(url, loaded), seats_of(loaded, plan, self.deployed), lambda: process.is_alive
        )
        try:
            await engine.open()
        except BaseException:
            await self._ended(process)
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
            await self._ended(found[1])

    async def _ended(self, process: Process) -> None:
        def end() -> None:
            process.stop_here(at_once=self._hurries)

        # An engine that is being ended is ended, whoever loses patience meanwhile.
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._threads, end))
        self._there.discard(process)

    async def sleep(self, engine: Engine) -> bool:
        """Whether it sleeps now: its weights wait in the host's memory."""
        found = self._running.get(id(engine))
        return bool(found and found[2].sleeps and await found[0].post("/sleep?level=1", _SLEEP_S))

    async def wake(self, engine: Engine) -> None:
        """Makes it ready again; raises EngineError."""
        found = self._running.get(id(engine))
        if found is None or not await found[0].post("/wake_up", _WAKE_S):
            raise EngineError(f"{engine.about} did not wake up; see its log in {self.logs}")

    def hurry(self) -> None:
        """Engines are killed from now on: those that run, that are being started, and that are being ended."""
        self._hurries = True
        for process in list(self._there):
            process.hurry()
            if process.local is not None and process.is_alive:
                process.local.process.kill()

    async def close(self) -> None:
        """Ends all."""
        await asyncio.gather(*(self.stop(engine) for engine, _, _ in list(self._running.values())))
        self._threads.shutdown(wait=False)


def safe(name: str) -> str:
    """A name as a part of a file's name."""
    return "".join(c if c.isalnum() or c in "-._" else "_" for c in name)
