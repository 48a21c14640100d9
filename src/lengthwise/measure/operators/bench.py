"""Times points in groups that are on the device together; each round repeats every point of a group once."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np

from lengthwise.catalog import weight_bytes
from lengthwise.measure.operators.device import MIN_FREE_GB, Device, gpu_errors
from lengthwise.measure.operators.kernels import Kernel, Kernels, Memory, call_torch, is_lost
from lengthwise.measure.operators.points import DECODE, PREFILL, LostError, NoRoomError, Point, SkippedError
from lengthwise.schema.errors import ProfileError
from lengthwise.schema.specs import ModelSpec

MIN_REPEATS, ENOUGH_S = 3, 0.25


@dataclass(frozen=True)
class Sample:
    """Seconds of one call in one repeat: wall-clock time, and CPU time if it is known."""

    wall_s: float
    cpu_s: float | None = None


class Prepared(Protocol):
    """A point whose kernel is warm and ready to be timed."""

    backend: str

    def sample(self) -> Sample:
        """Measure one repeat.

        Raises NoRoomError if memory is short, LostError if the device fails, and SkippedError for other failures.
        """


class Bench(Protocol):
    """The device on which points are measured."""

    def prepare(self, point: Point) -> Prepared:
        """Allocate tensors, choose a kernel and warm it up. Raises the same errors as ``Prepared.sample``."""

    def discard(self) -> None:
        """Free the device memory of points that are no longer referenced."""


@dataclass(frozen=True)
class Outcome:
    """All repeats of a point, or the reason why the point was skipped."""

    point: Point
    wall_s: tuple[float, ...] = ()
    cpu_s: tuple[float, ...] = ()
    backend: str = ""
    skipped: str = ""

    @cached_property
    def seconds(self) -> float:
        """Median of the wall-clock time, or of the CPU time if it is smaller because other processes also ran."""
        return min(self.wall_median_s, float(np.median(self.cpu_s))) if self.cpu_s else self.wall_median_s

    @cached_property
    def wall_median_s(self) -> float:
        """Median of the wall-clock time."""
        return float(np.median(self.wall_s))

    @property
    def is_cpu_time(self) -> bool:
        """Whether CPU time is known and wall-clock time is more than 5 % longer, so that ``seconds`` is CPU time."""
        return bool(self.cpu_s) and self.wall_median_s > 1.05 * float(np.median(self.cpu_s))

    @cached_property
    def spread_s(self) -> float:
        """Interquartile range of the repeats whose median is ``seconds``, or NaN for a single repeat."""
        if len(self.wall_s) < 2:
            return float("nan")
        repeats_s = self.cpu_s if self.cpu_s and float(np.median(self.cpu_s)) < self.wall_median_s else self.wall_s
        return float(np.subtract(*np.percentile(repeats_s, [75, 25])))

    def merged(self, other: Outcome) -> Outcome:
        """Return an outcome with the repeats of both. If ``other`` was skipped, return this outcome."""
        wall_s, cpu_s = self.wall_s + other.wall_s, self.cpu_s + other.cpu_s
        return self if other.skipped else Outcome(self.point, wall_s, cpu_s, other.backend or self.backend)


def measure(
    bench: Bench, points: Sequence[Point], repeats: int, late: Callable[[], bool] = lambda: False
) -> list[Outcome]:
    """Measure points in groups that fit the device and return outcomes. A LostError has the outcomes so far.

    A point has ``repeats``, or fewer (at least MIN_REPEATS) if they take over ENOUGH_S. Once ``late()`` is true, no
    further point is prepared, so that the remaining ones have no outcome, and rounds end when every point has
    MIN_REPEATS. A point that lacks memory beside others is tried alone before it is skipped.
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
        del group  # releases its tensors on the device
        bench.discard()
    return done


class _Group:
    """Points whose tensors are on the device at the same time."""

    def __init__(self, bench: Bench, late: Callable[[], bool]) -> None:
        self._bench, self._late = bench, late
        self._points: list[Point] = []
        self._ready: dict[int, Prepared] = {}
        self._samples: dict[int, list[Sample]] = {}
        self._reason: dict[int, str] = {}
        self._current = 0
        self.crowded: list[Point] = []

    def prepare(self, left: deque[Point]) -> None:
        """Prepare points from ``left`` until one lacks memory beside the earlier ones, and put that point back."""
        while left and not (self._ready and self._late()):
            self._current = len(self._points)
            self._points.append(left.popleft())
            try:
                self._ready[self._current] = self._bench.prepare(self._points[-1])
                self._samples[self._current] = []
            except SkippedError as error:
                if isinstance(error, NoRoomError) and self._ready:
                    left.appendleft(self._points.pop())
                    return
                self._reason[self._current] = str(error) or "out of memory"
            if self._current in self._reason:  # only after the error is gone, because its frames reference tensors
                self._bench.discard()

    def repeat(self, repeats: int) -> None:
        for turn in range(repeats):
            if turn >= MIN_REPEATS and self._late():
                break
            for i in list(self._ready):
                samples = self._samples[i]
                if len(samples) >= MIN_REPEATS and sum(s.wall_s for s in samples) > ENOUGH_S:
                    continue
                self._current = i
                try:
                    samples.append(self._ready[i].sample())
                except SkippedError as error:
                    if isinstance(error, NoRoomError) and len(self._ready) > 1:
                        self.crowded.append(self._points[i])
                    else:
                        self._reason[i] = str(error) or "out of memory"
                    del self._samples[i]
                if i not in self._samples:
                    del self._ready[i]

    def outcomes(self, lost: str = "") -> list[Outcome]:
        if lost:
            self._reason[self._current] = f"the device failed: {lost}"
        found = {i: Outcome(self._points[i], skipped=reason) for i, reason in self._reason.items()}
        for i, samples in self._samples.items():
            if samples and i not in found:
                cpu_s = tuple(s.cpu_s for s in samples if s.cpu_s is not None)
                complete = cpu_s if len(cpu_s) == len(samples) else ()
                wall_s = tuple(s.wall_s for s in samples)
                found[i] = Outcome(self._points[i], wall_s, complete, self._ready[i].backend)
        return [found[i] for i in sorted(found)]


_SAMPLE_S = 2e-3
_MAX_CALLS = 1000
_SLOW_S = 0.25
_GRAPH_S = 5e-3  # a kernel that takes longer hides its own launch
_GPU_SAMPLE_S = 1e-3


class HostTimer:
    """Times a kernel by the host's clock. At the end of every sample, the host waits for the GPU."""

    def __init__(self, torch: Any, kernel: Kernel, *, device: str, one_thread: bool) -> None:
        # With one thread, all work is on this thread, so that its CPU time is complete.
        self._torch, self._kernel, self._device, self._one_thread = torch, kernel, device, one_thread
        self.backend = kernel.backend
        self._calls, self._turn = 1, 0
        first_s = self.sample().wall_s
        if first_s < _SLOW_S:
            first_s = min(first_s, self.sample().wall_s)
            self._calls = max(1, min(_MAX_CALLS, math.ceil(_SAMPLE_S / max(first_s, 1e-9))))

    def sample(self) -> Sample:
        """Measure one repeat of enough calls to take about two milliseconds."""
        return call_torch(self._torch, self._sample)

    def _sample(self) -> Sample:
        kernel, start, calls = self._kernel, self._turn, self._calls
        with self._torch.inference_mode(), kernel.scope():
            wall_s, cpu_s = time.perf_counter(), time.thread_time()
            for i in range(start, start + calls):
                kernel.run(i % kernel.copies)
            if self._device == "cuda":
                self._torch.cuda.synchronize()
            cpu_s, wall_s = time.thread_time() - cpu_s, time.perf_counter() - wall_s
        self._turn = (start + calls) % kernel.copies
        return Sample(wall_s / calls, cpu_s / calls if self._one_thread else None)


class CudaTimer:
    """Times a kernel by CUDA events. Short kernels run in a CUDA graph, so that launches do not count."""

    def __init__(self, torch: Any, kernel: Kernel, flush: Any) -> None:
        self._torch, self._kernel, self._flush = torch, kernel, flush
        self.backend = kernel.backend
        self._calls, self._turn, self._graph = 1, 0, None
        call_torch(torch, self._warm_up)

    def sample(self) -> Sample:
        """Measure one repeat: the time between two events, divided by the number of calls between them."""
        return call_torch(self._torch, self._sample)

    def _warm_up(self) -> None:
        torch, kernel = self._torch, self._kernel
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.inference_mode(), kernel.scope():
            for i in range(3):
                kernel.run(i % kernel.copies)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        once_s = self._sample().wall_s
        if once_s < _GRAPH_S:
            self._calls = max(kernel.copies, min(64, math.ceil(_GPU_SAMPLE_S / max(once_s, 1e-7))))
            self._graph = self._capture_graph()
            self._sample()

    def _capture_graph(self) -> Any:
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
        finally:  # a failed capture leaves its own stream the current one
            torch.cuda.set_stream(stream)
        return graph

    def _run_all(self) -> None:
        for i in range(self._turn, self._turn + self._calls):
            self._kernel.run(i % self._kernel.copies)

    def _sample(self) -> Sample:
        torch = self._torch
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.inference_mode():
            self._flush.zero_()  # evicts the caches and keeps the GPU busy while the host enqueues the calls
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
    """Prepares the points of a model's operators with torch. ``seed`` determines the content of tensors."""

    def __init__(self, torch: Any, model: ModelSpec, device: Device, seed: int = 0) -> None:
        self._torch, self._device = torch, device
        self._flush: Any = None
        with gpu_errors(device.kind):
            self._memory = Memory(torch, device.kind, getattr(torch, device.dtype), seed)
            if device.kind == "cuda":
                self._warm_up()
        self._kernels = Kernels(self._memory, model, lambda tp: weight_bytes(model, device.dtype) / tp)

    def prepare(self, point: Point) -> Prepared:
        """Return a timer whose kernel is warm. Weights of other operators are dropped if memory is short."""
        try:
            try:
                return self._prepared(point)
            except NoRoomError:
                self._memory.drop_weights()
            self.discard()  # only after the error is gone, because its frames reference tensors
            return self._prepared(point)
        except (RuntimeError, ProfileError) as error:
            first = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise (LostError if is_lost(self._torch) else SkippedError)(first) from error

    def discard(self) -> None:
        """Free the device memory of points that are no longer referenced, unless the device has failed."""
        if self._device.kind == "cuda":
            gc.collect()
            with contextlib.suppress(RuntimeError):
                self._torch.cuda.empty_cache()

    def _prepared(self, point: Point) -> Prepared:
        build: Callable[[], Kernel] = partial(self._kernels.rows, point.operator, point.at[0])
        if point.operator.kind == PREFILL:
            build = partial(self._kernels.prefill, point.operator, *point.at)
        elif point.operator.kind == DECODE:
            build = partial(self._kernels.decode, point)
        kind = self._device.kind
        with self._torch.inference_mode():
            kernel = call_torch(self._torch, build)
        if not kernel.on_host and kind == "cuda":
            return CudaTimer(self._torch, kernel, self._flush)
        return HostTimer(self._torch, kernel, device=kind, one_thread=kind == "cpu" and self._device.threads == 1)

    def _warm_up(self) -> None:
        """Allocate the flush buffer, then compute for half a second so that the GPU raises its clocks."""
        if (free := self._memory.free_bytes()) < MIN_FREE_GB * 1e9:
            raise NoRoomError(f"{free / 1e9:.1f} GB of it are free")
        size = max(_FLUSH_BYTES, 4 * self._memory.cache_bytes)
        self._flush = self._torch.empty(size, dtype=self._torch.int8, device="cuda")
        x = self._torch.ones(_SPIN, _SPIN, device="cuda", dtype=self._memory.dtype)
        for _ in range(200):
            x @ x
        self._torch.cuda.synchronize()
