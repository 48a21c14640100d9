"""Tensors on the device: filled fast, refused where memory ends, weights kept as long as they may be wanted."""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from lengthwise.measure.operators.points import LostError, NoRoomError

T = TypeVar("T")
_BLOCK = 1 << 18
_SHARE = 0.6  # of free memory: torch needs some for results
_WEIGHTS_SHARE = 0.25
_CPU_CACHE_BYTES = 32 << 20
_NO_ROOM = ("out of memory", "t allocate", "alloc_failed")
MOST_COPIES = 64


class Memory:
    """Makes tensors of one dtype on one device.

    Args:
        torch: The module.
        device: "cpu" or "cuda".
        dtype: Of weights and activations.
        seed: Of what tensors hold.
    """

    def __init__(self, torch: Any, device: str, dtype: Any, seed: int) -> None:
        self.torch, self.device, self.dtype = torch, device, dtype
        self.cache_bytes = _last_cache_bytes(torch, device)
        self.generator = torch.Generator(device="cpu").manual_seed(seed)
        block = torch.rand(_BLOCK, generator=self.generator) - 0.5
        self._block = (block / 8).to(device=device, dtype=dtype)
        self._weights: OrderedDict[str, list[Any]] = OrderedDict()
        self._may_keep_bytes = _WEIGHTS_SHARE * self.free_bytes()

    def real(self, *shape: int) -> Any:
        """Random numbers of modest size."""
        self.require(math.prod(shape) * self.dtype.itemsize)
        tensor = self.torch.empty(shape, device=self.device, dtype=self.dtype)
        flat = tensor.view(-1)
        whole = len(flat) // _BLOCK * _BLOCK
        flat[:whole].view(-1, _BLOCK).copy_(self._block)
        flat[whole:].copy_(self._block[: len(flat) - whole])
        return tensor

    def whole(self, below: int, *shape: int) -> Any:
        """Random whole numbers from 0 up to, without, ``below``."""
        return self.torch.randint(below, shape, generator=self.generator).to(self.device)

    def cold(self, key: str, of_model_bytes: float, *shape: int) -> list[Any]:
        """Copies of weights, so many that the caches hold them no better than they hold a model's.

        Args:
            key: Whose weights; made once, and kept as long as there is room.
            of_model_bytes: What passes through the caches between two uses in a model.
            shape: Of one copy.
        """
        if key in self._weights:
            self._weights.move_to_end(key)
            return self._weights[key]
        copies = self.copies(math.prod(shape) * self.dtype.itemsize, of_model_bytes)
        made = [self.real(*shape) for _ in range(copies)]
        self._weights[key] = made
        while len(self._weights) > 1 and self._kept_bytes() > self._may_keep_bytes:
            self._weights.popitem(last=False)
        return made

    def copies(self, each_bytes: float, of_model_bytes: float) -> int:
        """How many copies do what a model's other layers do to the caches."""
        wanted = min(2.0 * self.cache_bytes, max(of_model_bytes, each_bytes))
        return max(1, min(MOST_COPIES, math.ceil(wanted / max(each_bytes, 1.0))))

    def require(self, needed_bytes: float) -> None:
        """Nothing, if there is room on a CPU, where asking for too much kills the process.

        Raises:
            NoRoomError: There is not.
        """
        if self.device == "cpu" and needed_bytes > _SHARE * (free := self.free_bytes()):
            raise NoRoomError(f"{needed_bytes / 1e9:.1f} GB are wanted, {free / 1e9:.1f} GB are free")

    def drop_weights(self) -> None:
        """Forgets all weights that are kept."""
        self._weights.clear()

    def free_bytes(self) -> float:
        """Memory of the device that nobody uses."""
        if self.device == "cuda":
            return float(self.torch.cuda.mem_get_info()[0])
        return _free_host_bytes()

    def _kept_bytes(self) -> int:
        return sum(one.nbytes for copies in self._weights.values() for one in copies)


def translated(torch: Any, call: Callable[[], T]) -> T:
    """What the call returns; torch's ways of having no memory become one.

    Raises:
        NoRoomError: The device or the host has no memory.
        LostError: An error of a GPU that stays until the process ends.
    """
    try:
        return call()
    except MemoryError as error:
        raise NoRoomError("out of memory") from error
    except RuntimeError as error:
        told = str(error)
        if is_lost(torch):
            raise LostError((told.splitlines() or ["it does not answer"])[0][:200]) from error
        if isinstance(error, torch.cuda.OutOfMemoryError) or any(w in told.lower() for w in _NO_ROOM):
            raise NoRoomError("out of memory") from error
        raise


def is_lost(torch: Any) -> bool:
    """Whether a GPU in use answers no more: what a kernel broke stays broken until the process ends.

    Asked twice, since the first answer may be of an error that passes.
    """
    if not torch.cuda.is_initialized():
        return False
    for _ in range(2):
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            continue
        return False
    return True


def _free_host_bytes() -> float:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
        return float(pages * os.sysconf("SC_PAGE_SIZE")) / 2 if pages else 4e9


def _last_cache_bytes(torch: Any, device: str) -> int:
    if device == "cuda":
        return int(getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0)) or 50 << 20
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text(encoding="ascii").strip()
        return int(text[:-1]) << {"K": 10, "M": 20, "G": 30}[text[-1]]
    except (OSError, ValueError, KeyError, IndexError):
        return _CPU_CACHE_BYTES
