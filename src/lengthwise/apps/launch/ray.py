"""Engines on the nodes of a Ray cluster. Ray is imported when a cluster is asked for."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from lengthwise.apps.launch.engine import Engine, HttpEngine
from lengthwise.apps.launch.local import (
    DEFAULT,
    Deployed,
    EngineSpec,
    EngineTimeouts,
    Process,
    launch_of,
    max_num_seqs_of,
    safe,
)
from lengthwise.backend import Launch
from lengthwise.backend.process import last_lines
from lengthwise.schema.app import ModelPlan, Replica
from lengthwise.schema.errors import EngineError, InputError, MissingExtraError


class RayEngine:
    """An engine process on this node; if the actor dies, however, the process ends with it.

    Args:
        launch: What to run, by GPUs as this node counts them, address and port.
        gpus: How many the replica has.
        log_path: For what it prints, on this node.
        ready_s: How long it may take until it is ready.
        grace_s: How long it may take to end.
    """

    def __init__(
        self,
        launch: Callable[[tuple[int, ...], str, int], Launch],
        gpus: int,
        log_path: str,
        ready_s: float,
        grace_s: float,
    ) -> None:
        self._launch, self._gpus, self._log = launch, gpus, Path(log_path)
        self._host = _address()
        self._process = Process(self._at, self._log, ready_s=ready_s, grace_s=grace_s, host=self._host)

    def _at(self, port: int) -> Launch:
        return self._launch(_seen(self._gpus), self._host, port)

    def start(self) -> tuple[str, int]:
        """Address and process, once the engine is ready; raises EngineError."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        url = self._process.start_here()
        assert self._process.local is not None
        return url, self._process.local.process.pid

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.is_alive

    def message(self) -> str:
        """The last lines of its log."""
        return last_lines(self._log)

    def stop(self, *, at_once: bool) -> None:
        """Ends it."""
        self._process.stop_here(at_once=at_once)

    def call_off(self) -> None:
        """Its start, under way or to come, ends."""
        self._process.call_off()

    def hurry(self) -> None:
        """Its end, under way or to come, waits for nothing."""
        self._process.hurry()


def _address() -> str:
    """Of this node, as the others reach it; a cluster of one machine stays on loopback."""
    import ray

    nodes = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    return "127.0.0.1" if len(nodes) <= 1 else str(ray.util.get_node_ip_address())


def _seen(gpus: int) -> tuple[int, ...]:
    """The GPUs that Ray gave to this actor, as this node counts them; on a cluster without any: the first ones."""
    import ray

    ids = [str(one) for one in ray.get_gpu_ids()]
    known = [one for one in (os.environ.get("CUDA_VISIBLE_DEVICES") or "").split(",") if one]
    if ids:
        return tuple(int(one) for one in ids)
    return tuple(int(one) for one in known if one.isdigit()) or tuple(range(gpus))


Result = TypeVar("Result")
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
_POLL_INTERVAL_S = 0.5
_SLEEP_S, _WAKE_S = 60.0, 300.0
_PLACED_S = 60.0


def imported() -> Any:
    """Ray; raises MissingExtraError."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("running on Ray", "ray") from error
    return ray


@dataclass(eq=False)
class _Placed:
    """An engine on a node: its actor, the GPUs that are held for it, and whether it was seen alive last."""

    loaded: EngineSpec
    actor: Any = None
    group: Any = None
    engine: HttpEngine | None = None
    alive: bool = True
    over: threading.Event = field(default_factory=threading.Event)


@dataclass
class RayLauncher:
    """One actor a replica, in a placement group of its own: all of a replica's GPUs in one node.

    Actors only start, watch and stop the very process that the local launcher runs, and tell its address; requests go
    to it straight. Which GPUs of which node a replica gets is Ray's to say: the placement's numbers are how many.

    Attributes:
        models: What to load, by the models' numbers.
        logs: Folder of the engines' logs, on the nodes.
        address: Of the cluster; "local" starts one on this machine.
        deployed: What was planned, where vLLM's command is to be made.
        timeouts: How long engines may take.
        gpus: GPUs of a "local" cluster; None: those that Ray finds.
        resource: What Ray calls the GPUs.
    """

    models: Sequence[EngineSpec]
    logs: Path
    address: str = "auto"
    deployed: Deployed | None = None
    timeouts: EngineTimeouts = DEFAULT
    gpus: int | None = None
    resource: str = "GPU"
    is_placed: bool = True
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(64), init=False)
    _running: dict[int, _Placed] = field(default_factory=dict, init=False)
    _present: set[_Placed] = field(default_factory=set, init=False)
    _numbers: count[int] = field(default_factory=lambda: count(1), init=False)
    _hurries: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._ray = imported()
        self._joined = not self._ray.is_initialized()
        if self._joined:
            self._join()
        there = self._ray.cluster_resources().get(self.resource, 0)
        if there < 1:
            raise InputError(f"the Ray cluster must have GPUs; its nodes have no {self.resource!r}")

    def _join(self) -> None:
        own = {"include_dashboard": False, "num_gpus": self.gpus} if self.address == "local" else {}
        try:
            self._ray.init(self.address, log_to_driver=False, logging_level=logging.ERROR, **own)
        except (OSError, ValueError, RuntimeError) as error:
            raise InputError(
                f"no Ray cluster answers at {self.address!r} ({error}): start one with `ray start --head`, "
                "or use 'local'"
            ) from error

    async def _call(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def start(self, plan: ModelPlan, gpus: Replica) -> Engine:
        """A replica wherever Ray has room for it; raises EngineError."""
        loaded = self.models[plan.model]
        placed = _Placed(loaded)
        self._present.add(placed)  # from its start to its end: whoever has no patience meets it anywhere
        starting = asyncio.get_running_loop().run_in_executor(self._threads, self._started, plan, gpus, placed)
        try:
            url = await asyncio.shield(starting)
        except asyncio.CancelledError:
            placed.over.set()
            if placed.actor is not None:
                placed.actor.call_off.remote()
            (found,) = await asyncio.gather(starting, return_exceptions=True)
            if not isinstance(found, BaseException):
                await self._call(lambda: self._finished(placed))
            raise
        max_num_seqs = max_num_seqs_of(loaded, plan, self.deployed)
        engine = HttpEngine(self.timeouts.server(url, loaded), max_num_seqs, lambda: placed.alive)
        try:
            await engine.open()
        except BaseException:
            await self._call(lambda: self._finished(placed))
            raise
        placed.engine = engine
        self._running[id(engine)] = placed
        self._threads.submit(self._monitor_task, placed)
        return engine

    def _started(self, plan: ModelPlan, gpus: Replica, placed: _Placed) -> str:
        """Holds up the thread until the engine is ready; its address."""
        ray = self._ray
        try:
            placed.group = self._group(plan, placed)
            placed.actor = self._actor(plan, gpus, placed.loaded, placed.group)
            if placed.over.is_set():
                placed.actor.call_off.remote()
            url, _ = ray.get(placed.actor.start.remote())
        except ray.exceptions.RayTaskError as error:
            self._finished(placed)
            raise EngineError(_short_message(error)) from error
        except ray.exceptions.RayError as error:
            self._finished(placed)
            raise EngineError(
                f"the actor of {placed.loaded.name} was lost while it started: {_short_message(error)}"
            ) from error
        except BaseException:
            self._finished(placed)
            raise
        return str(url)

    def _group(self, plan: ModelPlan, placed: _Placed) -> Any:
        """GPUs of a replica, held in one node; raises EngineError."""
        from ray.util.placement_group import placement_group, remove_placement_group

        one, tries = plan.tp * plan.pp, round(_PLACED_S / _POLL_INTERVAL_S)
        group = placement_group([{self.resource: float(one)}], strategy="STRICT_PACK")
        while not group.wait(_POLL_INTERVAL_S):
            tries -= 1
            if tries == 0 or placed.over.is_set():
                remove_placement_group(group)
                raise EngineError(
                    f"a replica of {placed.loaded.name} must find {one} {self.resource}s free in one node of the Ray "
                    f"cluster; it did not within {_PLACED_S:g} s: end what else holds them, or plan replicas that fit "
                    "a node"
                )
        return group

    def _actor(self, plan: ModelPlan, gpus: Replica, loaded: EngineSpec, group: Any) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        one = plan.tp * plan.pp
        held: dict[str, Any] = {"num_gpus": one} if self.resource == "GPU" else {"resources": {self.resource: one}}
        made = self._ray.remote(num_cpus=0, max_restarts=0, max_concurrency=4, **held)(RayEngine)
        log = self.logs.absolute() / f"{safe(loaded.name)}-{next(self._numbers)}.log"
        launch = partial(_launched, loaded, plan, self.deployed and self.deployed(plan))
        strategy = PlacementGroupSchedulingStrategy(group)
        timeouts = self.timeouts
        return made.options(scheduling_strategy=strategy).remote(
            launch, len(gpus), str(log), timeouts.ready_s, timeouts.grace_s
        )

    def _monitor_task(self, placed: _Placed) -> None:
        """Asks the actor again and again whether its engine lives; an actor that is lost has taken it along."""
        while not placed.over.wait(_POLL_INTERVAL_S):
            try:
                placed.alive = self._ray.get(placed.actor.is_alive.remote(), timeout=30)
            except self._ray.exceptions.GetTimeoutError:
                continue
            except self._ray.exceptions.RayError:
                placed.alive = False
            if not placed.alive:
                return

    def _finished(self, placed: _Placed) -> None:
        """The process, the actor and what was held for it are let go."""
        from ray.util.placement_group import remove_placement_group

        placed.over.set()
        placed.alive = False
        if placed.actor is not None:
            try:
                wait_s = self.timeouts.grace_s + 10.0
                self._ray.get(placed.actor.stop.remote(at_once=self._hurries), timeout=wait_s)
            except self._ray.exceptions.RayError:
                pass  # it is gone, and its engine with it
            self._ray.kill(placed.actor)
        if placed.group is not None:
            remove_placement_group(placed.group)
        self._present.discard(placed)

    async def stop(self, engine: Engine) -> None:
        """Ends it and lets its GPUs go."""
        placed = self._running.pop(id(engine), None)
        if placed is not None and placed.engine is not None:
            await placed.engine.close()
            await asyncio.shield(self._call(lambda: self._finished(placed)))

    async def sleep(self, engine: Engine) -> bool:  # noqa: ARG002 - the contract's
        """Never: Ray would hold its GPUs for it."""
        return False

    async def wake(self, engine: Engine) -> None:
        """Never asked for."""
        raise EngineError(f"{engine.description} was never put to sleep")

    def hurry(self) -> None:
        """Engines are killed from now on: those that run, that are being started, and that are being ended."""
        self._hurries = True
        for placed in list(self._present):
            if placed.actor is not None:
                placed.actor.hurry.remote()

    async def close(self) -> None:
        """Ends all, and leaves the cluster (a local one: ends it)."""
        engines = [placed.engine for placed in self._running.values() if placed.engine is not None]
        await asyncio.gather(*(self.stop(engine) for engine in engines))
        if self._joined:
            await self._call(self._ray.shutdown)
        self._threads.shutdown(wait=False)


def _launched(
    loaded: EngineSpec, plan: ModelPlan, deployment: Any, gpus: tuple[int, ...], host: str, port: int
) -> Launch:
    """The command of a replica on the node where it runs."""
    return launch_of(loaded, plan, gpus, host, port, None if deployment is None else lambda _: deployment)


def _short_message(error: Exception) -> str:
    """What went wrong on the node, in its own words."""
    cause = getattr(error, "cause", None)
    if cause is not None:
        return str(cause)
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
