# ruff: noqa: N802
"""What happens when a GPU is full, refuses, or breaks: control flow alone, by a torch of our own without numbers."""

import contextlib
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from lengthwise import catalog
from lengthwise.measure.operators.bench import CudaTimer, Sample, TorchBench, measure
from lengthwise.measure.operators.campaign import Campaign, Journal, Plan
from lengthwise.measure.operators.device import Device, choose_device
from lengthwise.measure.operators.kernels import Kernel, call_torch
from lengthwise.measure.operators.points import ROWS, LostError, NoRoomError, Operator, Point, SkippedError
from lengthwise.schema.errors import InputError

UP = Operator("mlp up", ROWS, (1,), (2048,), 8, {"n": 64, "k": 32})


class OutOfMemoryError(RuntimeError):
    pass


@dataclass
class FakeCuda:
    """Streams, events and failures, as torch.cuda has them; the clock stands still but for a tick an event."""

    free: float = 100e9
    broken: str = ""
    passing: int = 0
    refuses: str = ""
    capture: str = ""
    OutOfMemoryError = OutOfMemoryError
    stream_now: str = "main"
    captured: bool = False
    emptied: int = 0

    def is_available(self):
        return True

    def is_initialized(self):
        return True

    def get_device_capability(self, _):
        if self.refuses:
            raise RuntimeError(self.refuses)
        return (9, 0)

    def get_device_properties(self, _):
        return SimpleNamespace(L2_cache_size=50 << 20)

    def mem_get_info(self):
        return self.free, 140e9

    def synchronize(self):
        if self.passing:
            self.passing -= 1
            raise RuntimeError("CUDA error: an error that passes")
        if self.broken:
            raise RuntimeError(self.broken)

    def empty_cache(self):
        self.emptied += 1
        if self.broken:
            raise RuntimeError(self.broken)

    def current_stream(self):
        return SimpleNamespace(name=self.stream_now, wait_stream=lambda _: None)

    def set_stream(self, stream):
        self.stream_now = stream.name

    def Stream(self):
        return SimpleNamespace(name="side", wait_stream=lambda _: None)

    @contextlib.contextmanager
    def stream(self, one):
        before, self.stream_now = self.stream_now, one.name
        yield
        self.stream_now = before

    def CUDAGraph(self):
        return SimpleNamespace(replay=lambda: None)

    @contextlib.contextmanager
    def graph(self, _):
        """As torch's: what its end raises leaves the stream of the capture behind."""
        before, self.stream_now = self.stream_now, "capture"
        yield
        if self.capture:
            raise RuntimeError(self.capture)
        self.stream_now, self.captured = before, True

    def Event(self, *, enable_timing):
        assert enable_timing
        return SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda _: 0.1)


def fake_torch(**words):
    return SimpleNamespace(
        cuda=FakeCuda(**words),
        inference_mode=contextlib.nullcontext,
        version=SimpleNamespace(cuda="13.0"),
        __version__="2.13",
    )


def timer(torch):
    return CudaTimer(torch, Kernel(lambda _: None), SimpleNamespace(zero_=lambda: None))


def test_capture_that_fails_gives_the_stream_back_and_kernels_are_launched_one_by_one():
    torch = fake_torch(capture="CUDA error: operation failed due to a previous error during capture")
    one = timer(torch)
    assert torch.cuda.stream_now == "main"
    assert one.backend == "torch, launched one by one"
    assert one.sample().wall_s > 0


def test_capture_that_succeeds_is_replayed():
    torch = fake_torch()
    assert timer(torch).backend == "torch"
    assert torch.cuda.captured
    assert torch.cuda.stream_now == "main"


@pytest.mark.parametrize("words", ["CUDA out of memory. Tried", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED"])
def test_no_memory_has_many_words(words):
    def call():
        raise RuntimeError(words)

    with pytest.raises(NoRoomError):
        call_torch(fake_torch(), call)


def test_a_persistent_error_is_distinguished_from_a_passing_one():
    def call():
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more lines")

    with pytest.raises(LostError, match=r"an illegal memory access was encountered$"):
        call_torch(fake_torch(broken="CUDA error"), call)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        call_torch(fake_torch(passing=1), call)


def test_a_gpu_that_refuses_all_processes_is_reported_with_the_remedy():
    torch = fake_torch(refuses="CUDA error: all CUDA-capable devices are busy or unavailable")
    with pytest.raises(InputError, match=r"cannot be used: .*busy or unavailable.*nvidia-smi.*--device cpu"):
        choose_device(torch, catalog.model("llama-3-8b"), "cuda", "auto", None)


def test_a_gpu_without_memory_is_reported_with_the_remedy():
    import numpy as np

    class Tensor:
        def __sub__(self, _):
            return self

        def __truediv__(self, _):
            return self

        def to(self, **_):
            return self

    torch = fake_torch(free=0.5e9)
    torch.bfloat16 = np.dtype("float16")
    torch.rand = lambda *_, **__: Tensor()
    torch.Generator = lambda device: SimpleNamespace(manual_seed=lambda _: None)
    with pytest.raises(InputError, match=r"0\.5 GB of it are free.*must have 2 GB free"):
        TorchBench(torch, catalog.model("llama-3-8b"), Device("cuda", "bfloat16", 1))
    torch.rand = lambda *_, **__: (_ for _ in ()).throw(OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(InputError, match="CUDA out of memory"):
        TorchBench(torch, catalog.model("llama-3-8b"), Device("cuda", "bfloat16", 1))


@dataclass
class Crowd:
    """A device with room for so much at once, on which one point may break everything."""

    room: int
    breaks: int = 0
    late_room: int = 10**9
    validation: list = field(default_factory=list)
    attempts: list = field(default_factory=list)

    def prepare(self, point):
        rows = point.at[0]
        self.attempts.append(rows)
        if rows == self.breaks:
            raise LostError("CUDA error: misaligned address")
        if rows + sum(self.validation) > self.room:
            raise NoRoomError("out of memory")
        if rows == 13:
            raise SkippedError("no kernel")
        self.validation.append(rows)
        bench = self

        class One:
            backend = "fake"

            def sample(self):
                if rows > bench.late_room and len(bench.validation) > 1:
                    raise NoRoomError("out of memory")
                return Sample(rows * 1e-6)

            def __del__(self):
                bench.validation.remove(rows)

        return One()

    def discard(self):
        pass


def points(*rows):
    return [Point(UP, (n,)) for n in rows]


def reported(outcomes):
    return {o.point.at[0]: o.skipped or len(o.wall_s) for o in outcomes}


def test_points_that_neighbours_left_no_room_for_are_measured_alone():
    bench = Crowd(room=100)
    assert reported(measure(bench, points(60, 50, 13, 90, 10, 200), 3)) == {
        60: 3,
        50: 3,
        13: "no kernel",
        90: 3,
        10: 3,
        200: "out of memory",
    }
    assert not bench.validation


def test_points_that_run_out_of_memory_next_to_others_are_measured_alone():
    bench = Crowd(room=10**6, late_room=50)
    assert reported(measure(bench, points(60, 20, 30), 3)) == {60: 3, 20: 3, 30: 3}
    assert bench.attempts == [60, 20, 30, 60]


def test_when_the_device_breaks_points_are_retained_and_the_culprit_is_named():
    bench = Crowd(room=10**6, breaks=40)
    with pytest.raises(LostError) as caught:
        measure(bench, points(10, 13, 40, 50), 3)
    assert reported(caught.value.outcomes) == {13: "no kernel", 40: "the device failed: CUDA error: misaligned address"}
    assert 50 not in bench.attempts


def test_campaign_ends_where_the_device_does_and_resumed_leaves_the_culprit_out(tmp_path):
    file, clock = tmp_path / "points.jsonl", iter(range(10**6)).__next__

    def campaign(bench):
        journal = Journal(file, {}, [UP])
        return Campaign(Plan((UP,), 1e6), bench, journal, clock, lambda *_: None)

    one = campaign(Crowd(room=10**6, breaks=256))
    outcomes = one.run()
    assert one.lost == "CUDA error: misaligned address"
    assert [o.point.at for o in outcomes if o.skipped] == [(256,)]
    bench = Crowd(room=10**6, breaks=256)
    again = campaign(bench)
    told_again = reported(again.run())
    assert not again.lost
    assert 256 not in bench.attempts
    assert told_again[64] >= 3
    assert set(reported(outcomes)) <= set(told_again)


def test_collectives_of_gpus_are_timed_between_events_the_slowest_rank_counts():
    from lengthwise.measure.operators import collective_worker

    done = []
    torch = fake_torch()

    def event(*, enable_timing):
        assert enable_timing
        return SimpleNamespace(
            record=lambda: done.append("event"), synchronize=lambda: None, elapsed_time=lambda _: 2.0
        )

    torch.cuda.Event, torch.cuda._sleep = event, lambda _: done.append("sleep")  # noqa: SLF001 - torch's
    torch.tensor = lambda values, **_: SimpleNamespace(values=values, tolist=lambda: [3 * v for v in values])
    torch.float64 = None
    reduced = []
    dist = SimpleNamespace(
        barrier=lambda: done.append("barrier"),
        all_reduce=lambda tensor, op: reduced.append((tensor.values, op)),
        ReduceOp=SimpleNamespace(MAX="max"),
    )
    reported = collective_worker.by_events(torch, dist, lambda: done.append("call"), 2)
    calls = collective_worker.CALLS
    one = ["barrier", "sleep", "call", "event", *["call"] * calls, "event"]
    assert done == one * 2
    assert reduced == [([2e-3 / calls] * 2, "max")]
    assert reported == pytest.approx([6e-3 / calls] * 2)
