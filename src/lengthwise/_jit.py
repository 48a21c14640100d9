"""The only place that says njit.

Compiled code is cached in the user's cache folder under a stamp of *all* jitted sources, the
Numba version and the flags that change code. Numba's own stamp covers only the file of the
function itself, so that a helper edited in another file, or a bounds check asked for with a
warm cache, would silently run stale code.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
import platformdirs
from numba import types
from numba.core import errors
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator

Function = Callable[..., Any]

CannotCompile = errors.NumbaError

f8, i8 = types.float64, types.int64
f8_1d, i8_1d, i8_2d = types.float64[::1], types.int64[::1], types.int64[:, ::1]
triple_of_ints = types.UniTuple(types.int64, 3)
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "python", "_nrt": False}
_INSIDE: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
_COMPILED = (
    "_jit.py",
    "schema/cost_tables.py",
    "schema/records.py",
    "cost/_lookup.py",
    "policy/*.py",
    "engine/*.py",
    "theory/batch_kernel.py",
    "schedule/_kernel.py",
)
DISABLED = bool(numba.config.DISABLE_JIT)


@cache
def source_stamp() -> str:
    """A digest of every source that machine code is made of, and of what else changes it."""
    root = Path(__file__).parent
    digest = hashlib.sha256(f"{numba.__version__} bounds={numba.config.BOUNDSCHECK}".encode())
    for pattern in _COMPILED:
        for path in sorted(root.glob(pattern)):
            digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:20]


def cache_folder() -> Path:
    """Where compiled code of this version of the sources lies (LENGTHWISE_CACHE_DIR overrides)."""
    root = os.environ.get("LENGTHWISE_CACHE_DIR") or platformdirs.user_cache_dir("lengthwise")
    return Path(root) / "compiled" / source_stamp()


class _Locator(_CacheLocator):  # type: ignore[misc]
    def __init__(self, py_func: Function) -> None:
        self._name = f"{py_func.__module__}.{py_func.__qualname__}"

    def get_cache_path(self) -> str:
        return str(cache_folder())

    def get_source_stamp(self) -> str:
        return source_stamp()

    def get_disambiguator(self) -> str:
        return hashlib.sha256(self._name.encode()).hexdigest()[:10]

    @classmethod
    def from_function(cls, py_func: Function, py_file: str) -> _Locator | None:
        """Numba asks every locator; None says that nothing can be stored."""
        del py_file
        try:
            cache_folder().mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=cache_folder()):
                return cls(py_func)
        except OSError:
            return None


class _CacheImpl(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = [_Locator]  # noqa: RUF012  Numba's own shape


class _Cache(FunctionCache):  # type: ignore[misc]
    _impl_class = _CacheImpl


def jit(function: Function) -> Any:
    """A compiled function for other compiled functions to call, always inlined into them.

    It has no wrapper for Python (a wrapper a helper doubled the time to compile the kernel), so
    Python must not call it.

    Without inlining, and without turning reference counts off (nothing here allocates), passing
    the kernel's state costs more than the work: measured 15 us a step against 0.2 us.
    """
    return numba.njit(**_OPTIONS, **_INSIDE, forceinline=True)(function)


def jit_cold(function: Function) -> Any:
    """As ``jit``, for what is rare: kept out of line, so that the kernel compiles sooner."""
    return numba.njit(**_OPTIONS, **_INSIDE)(function)


def compile_now(function: Function, signature: Any, *, cached: bool) -> Any:
    """A function compiled for exactly one signature, from the disk cache where ``cached``.

    Raises:
        CannotCompile: The function cannot be compiled.
    """
    dispatcher = numba.njit(**_OPTIONS)(function)
    if DISABLED:
        return dispatcher
    if cached:
        _cache_writable_or_off(dispatcher, function)
    try:
        dispatcher.compile(signature)
    except Exception:
        if not cached:
            raise
        dispatcher = _compile_over_damage(function, signature)
    dispatcher.disable_compile()
    return dispatcher


def _compile_over_damage(function: Function, signature: Any) -> Any:
    """Compiles anew over cache files that cannot be read (a full disk, a kill while writing)."""
    for path in cache_folder().glob(f"*{function.__qualname__}-*"):
        path.unlink(missing_ok=True)
    dispatcher = numba.njit(**_OPTIONS)(function)
    _cache_writable_or_off(dispatcher, function)
    dispatcher.compile(signature)
    return dispatcher


def _cache_writable_or_off(dispatcher: Any, function: Function) -> None:
    try:
        dispatcher._cache = _Cache(function)  # noqa: SLF001
    except (OSError, RuntimeError):
        return  # a read-only home: compile every time rather than fail


def is_cached(name: str) -> bool:
    """Whether a compiled function whose name holds ``name`` lies in the cache."""
    return any(name in path.name for path in cache_folder().glob("*.nbi"))


def function_type(signature: Any) -> Any:
    """The type of a function argument of this signature."""
    return types.FunctionType(signature)


def type_of(value: Any) -> Any:
    """The compiled type of a value."""
    return numba.typeof(value)


def none(*arguments: Any) -> Any:
    """The signature of a function that returns nothing."""
    return types.void(*arguments)
