"""Engines on the nodes of a Ray cluster. Ray is imported only when a cluster is used."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from lengthwise.apps.launch.engine import Engine, HttpEngine, Launcher
from lengthwise.apps.launch.local import DEFAULT, Deployed, EngineConfig, EngineTimeouts, Process, connect, slug
from lengthwise.backend import Launch
from lengthwise.schema.app import ModelPlan, Replica
from lengthwise.schema.errors import EngineError, InputError, MissingExtraError

Result = TypeVar("Result")
_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
_POLL_INTERVAL_S = 0.5
_PLACEMENT_S = 60.0


class RayEngine:
    """An actor that runs an engine ``process`` on its node. The process ends with the actor.

    ``launch`` returns the command for GPU numbers of the node, a host and a port. ``log_path`` is on the node.
    """

    def __init__(
        self, launch: Callable[[tuple[int, ...], str, int], Launch], gpus: int, log_path: str, limits: EngineTimeouts
    ) -> None:
        import ray

        self._log = Path(log_path)
        # The address at which other nodes reach this one, or loopback in a cluster of one machine.
        nodes = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        host = "127.0.0.1" if len(nodes) <= 1 else str(ray.util.get_node_ip_address())
        assigned = [int(gpu) for gpu in map(str, ray.get_gpu_ids())]
        if not assigned:  # Ray assigned another resource than GPUs: take the visible GPUs, or the first ones
            visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or "").split(",")
            assigned = [int(gpu) for gpu in visible if gpu.isdigit()] or list(range(gpus))
        self.process = Process(lambda port: launch(tuple(assigned), host, port), self._log, limits, host)

    def start(self) -> str:
        """Start the process, and return the address once the engine is ready."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        return self.process.start_blocking()

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return self.process.is_alive

    def stop(self, *, at_once: bool) -> None:
        """End the process."""
        self.process.stop_blocking(at_once=at_once)

    def cancel_start(self) -> None:
        """Cancel the start of the process."""
        self.process.cancel_start()

    def force_stop(self) -> None:
        """Kill the process instead of waiting for its end."""
        self.process.force_stop()


def import_ray() -> Any:
    """Import and return the module ray. Raises MissingExtraError if ray is not installed."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("running on Ray", "ray") from error
    return ray


@dataclass(eq=False)
class _Placed:
    config: EngineConfig
    actor: Any = None
    group: Any = None
    engine: HttpEngine | None = None
    alive: bool = True
    exited: threading.Event = field(default_factory=threading.Event)


@dataclass
class RayLauncher(Launcher):
    """Starts an actor for each replica in a placement group of its own, so that its GPUs are in one node.

    Actors start, watch and stop the processes; requests go straight to the engines. Ray chooses the GPUs: of those
    that ``start`` receives, only the number matters.
    """

    models: Sequence[EngineConfig]  # configuration of each model's engines, by model number
    logs: Path  # folder of the engines' logs, on the nodes
    address: str = "auto"  # address of the cluster; "local" starts a cluster on this machine
    deployed: Deployed | None = None  # returns the deployment of a plan, from which vLLM's command follows
    timeouts: EngineTimeouts = DEFAULT
    gpus: int | None = None  # number of GPUs of a "local" cluster; None means all GPUs that Ray finds
    resource: str = "GPU"  # Ray's name of the GPUs
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(64), init=False)
    running: dict[int, _Placed] = field(default_factory=dict, init=False)
    placed: set[_Placed] = field(default_factory=set, init=False)
    _numbers: count[int] = field(default_factory=lambda: count(1), init=False)
    _kill: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._ray = import_ray()
        self._joined = not self._ray.is_initialized()
        if self._joined:
            own = {"include_dashboard": False, "num_gpus": self.gpus} if self.address == "local" else {}
            try:
                self._ray.init(self.address, log_to_driver=False, logging_level=logging.ERROR, **own)
            except (OSError, ValueError, RuntimeError) as error:
                raise InputError(
                    f"no Ray cluster answers at {self.address!r} ({error}): start one with `ray start --head`, "
                    "or use 'local'"
                ) from error
        if self._ray.cluster_resources().get(self.resource, 0) < 1:
            raise InputError(f"the Ray cluster must have GPUs; its nodes have no {self.resource!r}")

    async def _call(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def start(self, plan: ModelPlan, gpus: Replica) -> Engine:
        """Start a replica on GPUs that Ray chooses, and return the engine once it is ready."""
        placed = _Placed(self.models[plan.model])
        self.placed.add(placed)  # from before its start until after its end, for ``force_stop``
        starting = asyncio.get_running_loop().run_in_executor(self._threads, self._start, plan, gpus, placed)
        try:
            url = await asyncio.shield(starting)
        except asyncio.CancelledError:
            placed.exited.set()
            if placed.actor is not None:
                placed.actor.cancel_start.remote()
            (found,) = await asyncio.gather(starting, return_exceptions=True)
            if not isinstance(found, BaseException):
                await self._call(lambda: self._end(placed))
            raise
        server, limit = self.timeouts.server(url, placed.config), placed.config.concurrency(plan, self.deployed)
        engine = placed.engine = HttpEngine(server, limit, lambda: placed.alive)
        await connect(engine, lambda: self._call(lambda: self._end(placed)))
        self.running[id(engine)] = placed
        self._threads.submit(self._watch, placed)
        return engine

    def _start(self, plan: ModelPlan, gpus: Replica, placed: _Placed) -> str:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray, config, size = self._ray, placed.config, plan.tp * plan.pp
        try:
            deployment = self.deployed and self.deployed(plan)

            def launch(gpus: tuple[int, ...], host: str, port: int) -> Launch:
                return config.launch(plan, gpus, host, port, None if deployment is None else lambda _: deployment)

            placed.group = self._reserve(config.name, size, placed)
            resources: dict[str, Any] = (
                {"num_gpus": size} if self.resource == "GPU" else {"resources": {self.resource: size}}
            )
            actor = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=4, **resources)(RayEngine)
            log = self.logs.absolute() / f"{slug(config.name)}-{next(self._numbers)}.log"
            placed.actor = actor.options(scheduling_strategy=PlacementGroupSchedulingStrategy(placed.group)).remote(
                launch, len(gpus), str(log), self.timeouts
            )
            if placed.exited.is_set():
                placed.actor.cancel_start.remote()
            url = ray.get(placed.actor.start.remote())
        except ray.exceptions.RayTaskError as error:
            self._end(placed)
            raise EngineError(_short_message(error)) from error
        except ray.exceptions.RayError as error:
            self._end(placed)
            message = f"the actor of {config.name} was lost while it started: {_short_message(error)}"
            raise EngineError(message) from error
        except BaseException:
            self._end(placed)
            raise
        return str(url)

    def _reserve(self, name: str, size: int, placed: _Placed) -> Any:
        from ray.util.placement_group import placement_group, remove_placement_group

        group = placement_group([{self.resource: float(size)}], strategy="STRICT_PACK")
        polls = round(_PLACEMENT_S / _POLL_INTERVAL_S)
        while not group.wait(_POLL_INTERVAL_S):
            polls -= 1
            if polls == 0 or placed.exited.is_set():
                remove_placement_group(group)
                raise EngineError(
                    f"a replica of {name} needs {size} free {self.resource}s in one node of the Ray cluster; none had "
                    f"them within {_PLACEMENT_S:g} s: end programs that use them, or plan replicas that fit a node"
                )
        return group

    def _watch(self, placed: _Placed) -> None:
        while not placed.exited.wait(_POLL_INTERVAL_S):
            try:
                placed.alive = self._ray.get(placed.actor.is_alive.remote(), timeout=30)
            except self._ray.exceptions.GetTimeoutError:
                continue
            except self._ray.exceptions.RayError:
                placed.alive = False
            if not placed.alive:
                return

    def _end(self, placed: _Placed) -> None:
        from ray.util.placement_group import remove_placement_group

        placed.exited.set()
        placed.alive = False
        if placed.actor is not None:
            try:
                limit_s = self.timeouts.grace_s + 10.0
                self._ray.get(placed.actor.stop.remote(at_once=self._kill), timeout=limit_s)
            except self._ray.exceptions.RayError:
                pass  # the actor is gone, and its engine with it
            self._ray.kill(placed.actor)
        if placed.group is not None:
            remove_placement_group(placed.group)
        self.placed.discard(placed)

    async def stop(self, engine: Engine) -> None:
        """End an engine and free its GPUs."""
        placed = self.running.pop(id(engine), None)
        if placed is not None and placed.engine is not None:
            await placed.engine.close()
            await asyncio.shield(self._call(lambda: self._end(placed)))

    def force_stop(self) -> None:
        """Kill all engines, also those that start or end, and end later ones without a grace period."""
        self._kill = True
        for placed in list(self.placed):
            if placed.actor is not None:
                placed.actor.force_stop.remote()

    async def close(self) -> None:
        """End all engines and disconnect from the cluster, which ends a local cluster."""
        engines = [placed.engine for placed in self.running.values() if placed.engine is not None]
        await asyncio.gather(*(self.stop(engine) for engine in engines))
        if self._joined:
            await self._call(self._ray.shutdown)
        self._threads.shutdown(wait=False)


def _short_message(error: Exception) -> str:
    cause = getattr(error, "cause", None)
    if cause is not None:
        return str(cause)
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
