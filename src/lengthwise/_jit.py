"""Compiles functions, and caches the machine code on disk.

``_compiler`` compiles with Numba. It is imported only for code that the cache lacks, because the import of Numba takes
longer than most simulations. The cache is keyed by a digest of all jitted sources, the compiler's versions, the
processor and the settings that change code. Numba's own cache would load stale code after a change of the bounds checks
or of a helper in another file, because its key covers only the file of the function.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import platformdirs

from lengthwise._native import (
    Compiled,
    Function,
    Helper,
    Signature,
    by_pointer,
    f8,
    f8_1d,
    function_type,
    i8,
    i8_1d,
    i8_2d,
    none,
    pair_of_floats,
    pointer_to,
    triple_of_ints,
    type_of,
)

__all__ = [
    "DISABLED", "by_pointer", "cache_folder", "compile_detached", "compile_lock", "compile_now", "f8", "f8_1d",
    "function_type", "i8", "i8_1d", "i8_2d", "is_cached", "jit", "jit_cold", "none", "pair_of_floats", "pointer_to",
    "source_stamp", "triple_of_ints", "type_of",
]  # fmt: skip

_COMPILED = (
    "_jit.py", "_native.py", "_compiler.py", "schema/cost_tables.py", "schema/records.py",
    "schema/speculation.py", "cost/_lookup.py",
    "policy/*.py", "engine/*.py", "theory/batch_kernel.py", "schedule/kernel.py",
)  # fmt: skip
_CODE_SETTINGS = (
    "CPU_NAME", "CPU_FEATURES", "ENABLE_AVX", "OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "DISABLE_INTEL_SVML",
)  # fmt: skip

_LOCK = threading.RLock()
DETACHED_LIMIT_S = 1200.0
_POLL_S = 0.1
_DETACHED = """
import os, threading
os.nice(19)
limit = threading.Timer({limit_s}, os._exit, [1])
limit.daemon = True
limit.start()
{program}
"""


def _is_set(setting: str) -> bool:
    return os.environ.get(f"NUMBA_{setting}", "").strip() not in ("", "0")


DISABLED = _is_set("DISABLE_JIT")


@cache
def source_stamp() -> str:
    """Return a digest of all jitted sources, the compiler's versions and the flags that change machine code."""
    root = Path(__file__).parent
    versions = [importlib.metadata.version(name) for name in ("numba", "llvmlite")]
    digest = hashlib.sha256(f"{versions} bounds={_is_set('BOUNDSCHECK')}".encode())
    for pattern in _COMPILED:
        for path in sorted(root.glob(pattern)):
            digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:20]


def cache_folder() -> Path:
    """Return the folder of compiled code for these sources; the variable LENGTHWISE_CACHE_DIR overrides its root."""
    root = os.environ.get("LENGTHWISE_CACHE_DIR") or platformdirs.user_cache_dir("lengthwise")
    return Path(root) / "compiled" / source_stamp()


@cache
def _machine() -> str:
    """Return the processor that Numba compiles for, and Numba's settings, as a text: machine code depends on both."""
    from llvmlite import binding

    settings = {name: os.environ.get(f"NUMBA_{name}", "") for name in _CODE_SETTINGS}
    processor, features = settings["CPU_NAME"], settings["CPU_FEATURES"]
    if not features and processor != "generic":
        with suppress(RuntimeError):  # LLVM does not know the features of every processor
            features = binding.get_host_cpu_features().flatten()
    return f"{binding.get_process_triple()} {processor or binding.get_host_cpu_name()} {features} {settings}"


def jit(function: Function) -> Any:
    """Mark a function that compiled callers always inline. Python must not call it.

    It has no Python wrapper, because wrappers of helpers doubled the kernel's compile time, and no reference counts,
    because no compiled function allocates.
    """
    return function if DISABLED else Helper(function, inline=True)


def jit_cold(function: Function) -> Any:
    """Mark a rarely called function, which compiled callers do not inline, so that the kernel compiles faster."""
    return function if DISABLED else Helper(function, inline=False)


def compile_now(function: Function, signature: Signature, *, cached: bool) -> Any:
    """Compile a function for one signature; with ``cached``, load it from disk or store it there.

    With NUMBA_DISABLE_JIT, return the function itself. Numba's errors pass through.
    """
    if DISABLED:
        return function
    name = f"{function.__module__}.{function.__qualname__}"
    with _LOCK:
        stored = _Stored(name, signature) if cached else None
        if stored and (code := stored.read()):
            return Compiled(name, signature, code, {})
        from lengthwise import _compiler

        code = _compiler.compile_code(function, signature)
        with suppress(RuntimeError):
            compiled = Compiled(name, signature, code, {})
            if stored:
                stored.write(code)
            return compiled
        # The code refers to Numba's library. It is not stored, because only a process with Numba can load it.
        return Compiled(name, signature, code, _compiler.runtime_symbols())


class _Stored:
    """The file of a function's machine code. It begins with a digest of the code and of everything it depends on."""

    def __init__(self, name: str, signature: Signature) -> None:
        self._key = f"{name}\n{source_stamp()}\n{signature.key}\n{_machine()}".encode()
        digest = hashlib.sha256(self._key).hexdigest()[:16]
        self._path = cache_folder() / f"{re.sub('[^a-zA-Z0-9_.]', '_', name)}-{digest}.code"

    def _digest(self, code: bytes) -> bytes:
        return hashlib.sha256(self._key + code).digest()

    def read(self) -> bytes:
        """Return the code, or b"" if the file is missing, damaged, or of another function, version or processor."""
        try:
            content = self._path.read_bytes()
        except OSError:
            return b""
        digest, code = content[:32], content[32:]
        return code if digest == self._digest(code) else b""

    def write(self, code: bytes) -> None:
        """Write the code. If the folder cannot be written (a read-only home), do nothing: every process compiles."""
        part = self._path.with_name(f".{os.urandom(8).hex()}.part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(self._digest(code) + code)
            part.replace(self._path)
        except OSError:
            with suppress(OSError):
                part.unlink(missing_ok=True)


def is_cached(name: str) -> bool:
    """Return whether the cache has a compiled function of this name (with its module), for any processor."""
    return any(cache_folder().glob(f"{name}-*.code"))


@contextmanager
def compile_lock(*, wait_s: float) -> Iterator[bool]:
    """Hold the lock of these sources' cache while code is compiled; yield whether no other process holds it.

    First wait up to ``wait_s`` seconds for a process that holds it. A cache without a lock (it cannot be written, or
    the system has no ``fcntl``) stops nobody: every process compiles for itself.
    """
    try:
        import fcntl

        cache_folder().mkdir(parents=True, exist_ok=True)
        file = (cache_folder() / "lock").open("ab")
    except (ImportError, OSError):
        yield True
        return
    with file:
        is_free, end_s = False, time.monotonic() + wait_s
        while not is_free:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_free = True
            except BlockingIOError:
                if time.monotonic() >= end_s:
                    break
                time.sleep(_POLL_S)
            except OSError:  # a file system without locks
                is_free = True
        yield is_free


def compile_detached(program: str) -> bool:
    """Run a Python program that fills the cache, at the lowest priority, in a process that outlives this one.

    It ends after ``DETACHED_LIMIT_S`` at the latest, and is not started while another process compiles. Return False
    where the caller must compile: with LENGTHWISE_COMPILE=wait, in CI, on Windows, or if the cache cannot be written.
    """
    waits = os.environ.get("LENGTHWISE_COMPILE") == "wait" or os.environ.get("CI")
    if waits or os.name != "posix" or not sys.executable:
        return False
    import subprocess

    with compile_lock(wait_s=0) as is_free:
        if is_free and not os.access(cache_folder(), os.W_OK):
            return False
    if is_free:
        code, none = _DETACHED.format(limit_s=DETACHED_LIMIT_S, program=program), subprocess.DEVNULL
        process = subprocess.Popen(  # noqa: S603 - this interpreter
            [sys.executable, "-P", "-c", code], start_new_session=True, stdin=none, stdout=none, stderr=none
        )
        threading.Thread(target=process.wait, daemon=True).start()  # or it would stay a zombie in a long-lived server
    return True
