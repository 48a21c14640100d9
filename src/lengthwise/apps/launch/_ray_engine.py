"""What runs on a node of a Ray cluster: one engine process, kept by an actor."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from lengthwise.apps.launch._process import Process
from lengthwise.backend import Launch
from lengthwise.backend.process import last_lines
from lengthwise.schema.errors import EngineError


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

    def said(self) -> str:
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


__all__ = ["EngineError", "RayEngine"]
