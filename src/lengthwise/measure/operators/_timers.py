"""Repeats of a kernel, by the host's clocks or by events on the GPU."""

from __future__ import annotations

import math
import time
from typing import Any

from lengthwise.measure.operators._kernel import Kernel
from lengthwise.measure.operators._memory import translated
from lengthwise.measure.operators.timing import Sample

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
