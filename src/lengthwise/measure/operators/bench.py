"""Operators of a model on this machine's device, by torch."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

from lengthwise.catalog import weight_bytes
from lengthwise.measure.operators import _experts, _host
from lengthwise.measure.operators._attention import Attention
from lengthwise.measure.operators._kernel import Kernel
from lengthwise.measure.operators._memory import Memory, is_lost, translated
from lengthwise.measure.operators._rows import Rows
from lengthwise.measure.operators._site import Site
from lengthwise.measure.operators._timers import CudaTimer, HostTimer
from lengthwise.measure.operators.device import LEAST_FREE_GB, Device, opened
from lengthwise.measure.operators.points import (
    DECODE,
    PREFILL,
    LostError,
    NoRoomError,
    Point,
    SkippedError,
)
from lengthwise.measure.operators.timing import Prepared
from lengthwise.schema.errors import ProfileError
from lengthwise.schema.model import ModelSpec

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
            self.forget()  # not before the error is gone, whose frames hold tensors
            return self._prepared(point)
        except (RuntimeError, ProfileError) as error:
            first = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise (LostError if is_lost(self._torch) else SkippedError)(first) from error

    def forget(self) -> None:
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
            return _host.build(self._memory, at[0])
        if operator.name in _experts.NAMES:
            into = 2 if self._model.ffn.gated else 1
            return _experts.build(operator, at[0], self._memory, self._rows, into)
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
