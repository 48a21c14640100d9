"""Operators of a model on this machine's device, by torch."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from lengthwise.catalog import weight_bytes
from lengthwise.measure.operators import kernels
from lengthwise.measure.operators import kernels as _host
from lengthwise.measure.operators.device import LEAST_FREE_GB, Device, opened
from lengthwise.measure.operators.kernels import Attention, Kernel, Memory, Rows, Site, is_lost, translated
from lengthwise.measure.operators.points import DECODE, PREFILL, LostError, NoRoomError, Point, SkippedError
from lengthwise.schema.errors import ProfileError
from lengthwise.schema.specs import ModelSpec

LEAST_REPEATS, ENOUGH_S = 3, 0.25


@dataclass(frozen=True)
class Sample:
    """One repeat: seconds of one call by the clock, and of the processor (None: not told)."""

    wall_s: float
    cpu_s: float | None = None


class Prepared(Protocol):
    """A point that is warm and ready to be measured."""

    backend: str

    def sample(self) -> Sample:
        """One repeat.

        Raises:
            SkippedError: It cannot be measured here; NoRoomError: for want of memory.
            LostError: The device answers no more.
        """
        ...


class Bench(Protocol):
    """What points are measured on."""

    def prepare(self, point: Point) -> Prepared:
        """Allocates, chooses kernels, warms up.

        Raises:
            SkippedError: It cannot be measured here; NoRoomError: for want of memory.
            LostError: The device answers no more.
        """
        ...

    def discard(self) -> None:
        """Gives back the memory of points that nobody holds any more."""
        ...


@dataclass(frozen=True)
class Outcome:
    """All repeats of a point, or why it has none."""

    point: Point
    wall_s: tuple[float, ...] = ()
    cpu_s: tuple[float, ...] = ()
    backend: str = ""
    skipped: str = ""

    @cached_property
    def seconds(self) -> float:
        """The median; of the processor's seconds where they are told and fewer: others took the rest."""
        wall_s = self.wall_median_s
        return min(wall_s, float(np.median(self.cpu_s))) if self.cpu_s else wall_s

    @cached_property
    def wall_median_s(self) -> float:
        """The median by the clock: what a point takes to measure."""
        return float(np.median(self.wall_s))

    @property
    def by_processor(self) -> bool:
        """Whether ``seconds`` are the processor's since the wall's are a twentieth more."""
        return bool(self.cpu_s) and self.wall_median_s > 1.05 * float(np.median(self.cpu_s))

    @cached_property
    def spread_s(self) -> float:
        """The distance between the quartiles of the repeats that ``seconds`` is the median of."""
        if len(self.wall_s) < 2:
            return float("nan")
        of = self.cpu_s if self.cpu_s and float(np.median(self.cpu_s)) < self.wall_median_s else self.wall_s
        low, high = np.percentile(of, [25, 75])
        return float(high - low)

    def with_more(self, other: Outcome) -> Outcome:
        """The repeats of both."""
        if other.skipped:
            return self
        cpu_s = (*self.cpu_s, *other.cpu_s)
        return Outcome(self.point, (*self.wall_s, *other.wall_s), cpu_s, other.backend or self.backend)


def measure(
    bench: Bench, points: Sequence[Point], repeats: int, late: Callable[[], bool] = lambda: False
) -> list[Outcome]:
    """An outcome a point: all are prepared, then every round repeats each once.

    Slow points, once ENOUGH_S were spent on them, have LEAST_REPEATS rather than ``repeats``. Once ``late``
    says so no point is prepared, and rounds end when every point has LEAST_REPEATS; points that were never
    prepared have no outcome. A point that finds no room beside others is tried alone before it is skipped.

    Raises:
        LostError: The device answers no more. Its ``outcomes`` are what was measured until then.
    """
    done: list[Outcome] = []
    left, alone = deque(points), deque[Point]()
    while left or alone:
        if done and late():
            break
        group = _Group(bench, late)
        try:
            group.prepare(left or deque([alone.popleft()]))
            group.repeat(repeats)
        except LostError as error:
            error.outcomes = [*done, *group.outcomes(lost=str(error))]
            raise
        done += group.outcomes()
        alone += group.crowded
        del group  # and what it holds on the device
        bench.discard()
    return done


class _Group:
    """Points that are on the device at the same time."""

    def __init__(self, bench: Bench, late: Callable[[], bool]) -> None:
        self._bench, self._late = bench, late
        self._points: list[Point] = []
        self._ready: dict[int, Prepared] = {}
        self._samples: dict[int, list[Sample]] = {}
        self._reason: dict[int, str] = {}
        self._at = 0
        self.crowded: list[Point] = []

    def prepare(self, left: deque[Point]) -> None:
        """Takes points until one finds no room beside those before it, which waits until they are gone."""
        while left and not (self._ready and self._late()):
            self._at = len(self._points)
            self._points.append(left.popleft())
            try:
                self._ready[self._at] = self._bench.prepare(self._points[-1])
                self._samples[self._at] = []
            except NoRoomError as error:
                if self._ready:
                    left.appendleft(self._points.pop())
                    return
                self._reason[self._at] = str(error) or "out of memory"
            except SkippedError as error:
                self._reason[self._at] = str(error)
            if self._at in self._reason:
                self._bench.discard()

    def repeat(self, repeats: int) -> None:
        """Round after round."""
        for turn in range(repeats):
            if turn >= LEAST_REPEATS and self._late():
                break
            for i in list(self._ready):
                samples = self._samples[i]
                if len(samples) < LEAST_REPEATS or sum(s.wall_s for s in samples) <= ENOUGH_S:
                    self._sample(i)

    def _sample(self, i: int) -> None:
        self._at = i
        try:
            self._samples[i].append(self._ready[i].sample())
        except SkippedError as error:
            crowded = isinstance(error, NoRoomError) and len(self._ready) > 1
            if crowded:
                self.crowded.append(self._points[i])
            else:
                self._reason[i] = str(error) or "out of memory"
        if i in self._reason or self._points[i] in self.crowded:
            del self._ready[i], self._samples[i]

    def outcomes(self, lost: str = "") -> list[Outcome]:
        """One a point that was measured or skipped; ``lost``: the point under way broke the device."""
        if lost:
            self._reason[self._at] = f"the device failed: {lost}"
        measured = [i for i, samples in self._samples.items() if samples and i not in self._reason]
        return [
            _outcome(self._points[i], self._samples.get(i, []), self._ready.get(i), self._reason.get(i, ""))
            for i in sorted([*measured, *self._reason])
        ]


def _outcome(point: Point, samples: list[Sample], prepared: Prepared | None, cause: str) -> Outcome:
    if cause or prepared is None:
        return Outcome(point, skipped=cause or "out of memory")
    cpu_s = tuple(s.cpu_s for s in samples if s.cpu_s is not None)
    return Outcome(
        point, tuple(s.wall_s for s in samples), cpu_s if len(cpu_s) == len(samples) else (), prepared.backend
    )


_SAMPLE_S = 2e-3
_MOST_CALLS = 1000
_SLOW_S = 0.25
_GRAPH_S = 5e-3  # a kernel that takes longer hides its own launch
_GPU_SAMPLE_S = 1e-3


class HostTimer:
    """Times by the host's clock, with the processor's seconds where one thread does it all.

    Args:
        torch: The module.
        kernel: What to run.
        device: "cuda" waits for it at the end of every sample.
        one_thread: Whether the processor's seconds of this thread tell all.
    """

    def __init__(self, torch: Any, kernel: Kernel, *, device: str, one_thread: bool) -> None:
        self._torch, self._kernel, self._device, self._one = torch, kernel, device, one_thread
        self.backend = kernel.backend
        self._calls, self._turn = 1, 0
        first = self.sample().wall_s
        if first < _SLOW_S:
            first = min(first, self.sample().wall_s)
            self._calls = max(1, min(_MOST_CALLS, math.ceil(_SAMPLE_S / max(first, 1e-9))))

    def sample(self) -> Sample:
        """One repeat: enough calls to last two milliseconds."""
        return translated(self._torch, self._sample)

    def _sample(self) -> Sample:
        kernel, start, calls = self._kernel, self._turn, self._calls
        with self._torch.inference_mode(), kernel.scope():
            wall, cpu = time.perf_counter(), time.thread_time()
            for i in range(start, start + calls):
                kernel.run(i % kernel.copies)
            if self._device == "cuda":
                self._torch.cuda.synchronize()
            cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
        self._turn = (start + calls) % kernel.copies
        return Sample(wall / calls, cpu / calls if self._one else None)


class CudaTimer:
    """Times by events on the GPU; short kernels from a captured graph, so that launches do not count.

    Before the first event the caches are overwritten, which also keeps the GPU busy while the host
    enqueues what follows.

    Args:
        torch: The module.
        kernel: What to run.
        flush: A tensor larger than the caches.
    """

    def __init__(self, torch: Any, kernel: Kernel, flush: Any) -> None:
        self._torch, self._kernel, self._flush = torch, kernel, flush
        self.backend = kernel.backend
        self._calls, self._turn, self._graph = 1, 0, None
        translated(torch, self._warm_up)

    def sample(self) -> Sample:
        """One repeat: all calls between two events, by their number."""
        return translated(self._torch, self._sample)

    def _warm_up(self) -> None:
        torch, kernel = self._torch, self._kernel
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.inference_mode(), kernel.scope():
            for i in range(3):
                kernel.run(i % kernel.copies)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        once = self._sample().wall_s
        if once < _GRAPH_S:
            self._calls = max(kernel.copies, min(64, math.ceil(_GPU_SAMPLE_S / max(once, 1e-7))))
            self._graph = self._captured()
            self._sample()

    def _captured(self) -> Any:
        """A graph of all calls; None where something in them cannot be captured."""
        torch, kernel = self._torch, self._kernel
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.inference_mode(), kernel.scope(), torch.cuda.graph(graph):
                self._run_all()
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError:
            torch.cuda.set_stream(stream)
            torch.cuda.synchronize()
            self.backend = f"{kernel.backend}, launched one by one"
            return None
        finally:  # a capture that fails leaves its own stream the current one
            torch.cuda.set_stream(stream)
        return graph

    def _run_all(self) -> None:
        for i in range(self._turn, self._turn + self._calls):
            self._kernel.run(i % self._kernel.copies)

    def _sample(self) -> Sample:
        torch = self._torch
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.inference_mode():
            self._flush.zero_()
            start.record()
            if self._graph is not None:
                self._graph.replay()
            else:
                with self._kernel.scope():
                    self._run_all()
            end.record()
        end.synchronize()
        if self._graph is None:
            self._turn = (self._turn + self._calls) % self._kernel.copies
        return Sample(start.elapsed_time(end) / 1e3 / self._calls)


_FLUSH_BYTES = 256 << 20
_SPIN = 4096


class TorchBench:
    """Prepares points of a model's operators.

    Args:
        torch: The module.
        model: Whose operators.
        device: Where.
        seed: Of what tensors hold.
    """

    def __init__(self, torch: Any, model: ModelSpec, device: Device, seed: int = 0) -> None:
        self._torch, self._model, self._device = torch, model, device
        self._flush: Any = None
        with opened(device.kind):
            self._memory = Memory(torch, device.kind, getattr(torch, device.dtype), seed)
            if device.kind == "cuda":
                self._warm_up()
        site = Site(self._memory, model, self._shard_bytes)
        self._rows, self._attention = Rows(site), Attention(site)

    def prepare(self, point: Point) -> Prepared:
        """The point, warm and ready to be timed.

        Raises:
            NoRoomError: The memory does not suffice, even without the weights of other operators.
            SkippedError: Torch has no kernel for these shapes and this dtype.
            LostError: The GPU answers no more.
        """
        try:
            try:
                return self._prepared(point)
            except NoRoomError:
                self._memory.drop_weights()
            self.discard()  # not before the error is gone, whose frames hold tensors
            return self._prepared(point)
        except (RuntimeError, ProfileError) as error:
            first = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise (LostError if is_lost(self._torch) else SkippedError)(first) from error

    def discard(self) -> None:
        """Gives the memory of points that nobody holds any more back to the device, if that still answers."""
        if self._device.kind == "cuda":
            gc.collect()
            with contextlib.suppress(RuntimeError):
                self._torch.cuda.empty_cache()

    def _prepared(self, point: Point) -> Prepared:
        with self._torch.inference_mode():
            kernel: Kernel = translated(self._torch, lambda: self._kernel(point))
        on_host = kernel.on_host or self._device.kind == "cpu"
        if not on_host:
            return CudaTimer(self._torch, kernel, self._flush)
        one = self._device.kind == "cpu" and self._device.threads == 1
        return HostTimer(self._torch, kernel, device=self._device.kind, one_thread=one)

    def _kernel(self, point: Point) -> Kernel:
        operator, at = point.operator, point.at
        if operator.kind == PREFILL:
            return self._attention.prefill(operator, *at)
        if operator.kind == DECODE:
            return self._attention.decode(point)
        if operator.name == "host":
            return _host.build_host(self._memory, at[0])
        if operator.name in kernels.EXPERT_OPERATORS:
            into = 2 if self._model.ffn.gated else 1
            return kernels.build_experts(operator, at[0], self._memory, self._rows, into)
        return self._rows.build(operator, at[0])

    def _shard_bytes(self, tp: int) -> float:
        return weight_bytes(self._model, self._device.dtype) / tp

    def _warm_up(self) -> None:
        """Takes what is needed throughout; then work for half a second, so that the clocks are up."""
        if (free := self._memory.free_bytes()) < LEAST_FREE_GB * 1e9:
            raise NoRoomError(f"{free / 1e9:.1f} GB of it are free")
        size = max(_FLUSH_BYTES, 4 * self._memory.cache_bytes)
        self._flush = self._torch.empty(size, dtype=self._torch.int8, device="cuda")
        x = self._torch.ones(_SPIN, _SPIN, device="cuda", dtype=self._memory.dtype)
        for _ in range(200):
            x @ x
        self._torch.cuda.synchronize()
