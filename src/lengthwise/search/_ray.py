"""Workers on a Ray cluster. Ray is imported when a cluster is asked for."""

from __future__ import annotations

import logging
import os
import pickle
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Any, TypeVar

from lengthwise.schema.errors import InputError, LengthwiseError, MissingExtraError
from lengthwise.search._chunks import WAKE_S, Answer, SentError, answer, chunks
from lengthwise.search.store import code_version

T = TypeVar("T")
R = TypeVar("R")

_RETRIES = 3  # of a chunk whose node or process was lost; an error of the work itself is not tried again
_IN_FLIGHT = 2  # chunks a CPU: one under way, one that waits beside it
_REACH_S = 5.0
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@contextmanager
def cluster(address: str, jobs: int) -> Iterator[_Cluster]:
    """The workers of a cluster, which is left (a local one: ended) with the context.

    Raises:
        MissingExtraError: Ray is not installed.
        InputError: No cluster answers, or a node has another lengthwise or none.
    """
    ray = _imported()
    joined = not ray.is_initialized()
    if joined:
        _join(ray, address, jobs)
    try:
        _check_nodes(ray)
        yield _Cluster(ray, max(1, int(ray.cluster_resources().get("CPU", 1))))
    finally:
        if joined:
            ray.shutdown()


def _imported() -> Any:
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("searching on Ray", "ray") from error
    return ray


def _join(ray: Any, address: str, jobs: int) -> None:
    own = {"num_cpus": jobs, "include_dashboard": False} if address == "local" else {}
    try:
        _reach(address)
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"no Ray cluster answers at {address!r} ({error}): start one with `ray start --head`, "
            "or use 'local'"
        ) from error


def _here() -> tuple[str, str]:
    """What a node has: the version of lengthwise, and of all that decides a result."""
    return version("lengthwise"), code_version()


def _reach(address: str) -> None:
    """Raises OSError where nobody listens: Ray itself tries for a minute, then ends the whole process."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=_REACH_S).close()


def _check_nodes(ray: Any) -> None:
    """Raises InputError unless every node would come to the same results as this process."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask = ray.remote(num_cpus=0)(_here)
    asked = {
        node["NodeManagerAddress"]: ask.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for node in ray.nodes()
        if node["Alive"]
    }
    for name, told in asked.items():
        _check_node(ray, name, told)


def _check_node(ray: Any, name: str, told: Any) -> None:
    ours = version("lengthwise")
    try:
        theirs, code = ray.get(told)
    except ray.exceptions.RayError as error:
        raise InputError(
            f"node {name} of the Ray cluster has no lengthwise that can search: "
            f"install {ours} there ({_gist(error)})"
        ) from error
    if code != code_version():
        raise InputError(
            f"node {name} of the Ray cluster has another lengthwise ({theirs}) than this process ({ours}), "
            "or other versions of NumPy, Numba or SciPy: install the same on every node"
        )


@dataclass(frozen=True)
class _Cluster:
    ray: Any
    cpus: int

    def run(self, tasks: Sequence[T], work: Callable[[T], R]) -> Iterator[tuple[int, R]]:
        done = self.ray.remote(max_retries=_RETRIES)(_done)
        # Pickled as Ray does it (functions of a script by value), but loaded by us, for a clear error.
        load = [
            self.ray.put(self.ray.cloudpickle.dumps(work))
        ]  # in a list, Ray hands on where it is instead of what it is
        waiting = deque(chunks(len(tasks), self.cpus))
        flying: dict[Any, range] = {}
        try:
            while waiting or flying:
                while waiting and len(flying) < _IN_FLIGHT * self.cpus:
                    which = waiting.popleft()
                    flying[done.remote(load, [tasks[at] for at in which])] = which
                landed, _ = self.ray.wait(list(flying), timeout=WAKE_S)
                for told in landed:
                    yield from self._told(told, flying.pop(told))
        finally:
            for told in flying:
                self.ray.cancel(told, force=True)

    def _told(self, told: Any, which: range) -> Iterator[tuple[int, Any]]:
        try:
            came: Answer[Any] = self.ray.get(told)
        except self.ray.exceptions.RayError as error:
            raise LengthwiseError(
                f"the Ray cluster could not do a task, tried {_RETRIES + 1} times: {_gist(error)}"
            ) from error
        yield from zip(which, came.results, strict=False)
        if came.error is not None:
            raise came.error.as_raised()


def _gist(error: Exception) -> str:
    """Of Ray's pages of trace the line that says what happened."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _done(load: list[Any], tasks: list[Any]) -> Answer[Any]:
    """A chunk's answer, on a node."""
    try:
        work = _work(load[0])
    except Exception as error:  # noqa: BLE001 - a module that is not on the node, told as the work's error
        return Answer([], SentError.of(error))
    return answer(work, tasks)


@lru_cache(maxsize=1)
def _work(load: Any) -> Any:
    """The work, loaded once a process rather than once a chunk."""
    import ray

    return pickle.loads(ray.get(load))  # noqa: S301 - our own driver's
