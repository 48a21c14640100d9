"""Compiles functions with Numba, and caches the machine code on disk.

The cache is keyed by a digest of all jitted sources, the Numba version and the flags that change code. Numba's own key
covers only the file of the function itself: after a change of a helper in another file, or of the bounds checks, Numba
would load stale code.
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
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.datamodel.models import PrimitiveModel
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import intrinsic, lower_getattr_generic, register_model

Function = Callable[..., Any]

f8, i8 = types.float64, types.int64
f8_1d, i8_1d, i8_2d = types.float64[::1], types.int64[::1], types.int64[:, ::1]
triple_of_ints = types.UniTuple(types.int64, 3)
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "python", "_nrt": False}
_INSIDE: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
_COMPILED = (
    "_jit.py", "schema/cost_tables.py", "schema/records.py", "cost/_lookup.py", "policy/*.py", "engine/*.py",
    "theory/batch_kernel.py", "schedule/_kernel.py",
)  # fmt: skip
DISABLED = bool(numba.config.DISABLE_JIT)


@cache
def source_stamp() -> str:
    """Return a digest of all jitted sources, the Numba version and the flags that change machine code."""
    root = Path(__file__).parent
    digest = hashlib.sha256(f"{numba.__version__} bounds={numba.config.BOUNDSCHECK}".encode())
    for pattern in _COMPILED:
        for path in sorted(root.glob(pattern)):
            digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:20]


def cache_folder() -> Path:
    """Return the folder of compiled code for these sources; the variable LENGTHWISE_CACHE_DIR overrides its root."""
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
        """Return the locator, or None if the cache folder is not writable (Numba's interface)."""
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


class _HelperCode(JITCodeLibrary):  # type: ignore[misc]
    """The code of a helper: only its entry function optimizes it as a whole and turns it into machine code.

    Numba links a function with all that it calls, optimizes the whole and generates its machine code, and does so
    again in each caller.
    """

    def __init__(self, codegen: Any, name: str) -> None:
        super().__init__(codegen, name)
        self.environments: dict[str, Any] = {}

    def finalize(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Return 0, which means that there is no machine code (Numba's interface)."""
        del name
        return 0

    @property
    def codegen(self) -> Any:
        """Return an object with ``set_env`` (Numba's interface)."""
        return self

    def set_env(self, name: str, environment: Any) -> None:
        """Note the environment that an exception with arguments reads (Numba's interface)."""
        self.environments[name] = environment


class _EntryCode(JITCodeLibrary):  # type: ignore[misc]
    """The code of a function that Python calls, and of all its helpers."""

    def finalize(self) -> None:
        libraries = self._linking_libraries
        for library in libraries:
            libraries.extend(one for one in library._linking_libraries if one not in libraries)  # noqa: SLF001
        super().finalize()
        for library in libraries:
            for name, environment in getattr(library, "environments", {}).items():
                self.codegen.set_env(name, environment)

    def serialize_using_object_code(self) -> Any:
        """Return the machine code and the names of its functions, without LLVM's code, which no caller links."""
        names = [one.name for one in self.get_defined_functions() if one.linkage == binding.Linkage.external]
        symbols = binding.parse_assembly("\n".join(f'@"{name}" = global i8 0' for name in names))
        return self.name, "object", (self._get_compiled_object(), symbols.as_bitcode())


class _HelperCompiler(Compiler):  # type: ignore[misc]
    code: type[JITCodeLibrary] = _HelperCode

    def compile_extra(self, function: Function) -> Any:
        self.state.library = self.code(self.state.targetctx.codegen(), function.__qualname__)
        self.state.library.enable_object_caching()
        return super().compile_extra(function)


class _EntryCompiler(_HelperCompiler):
    code = _EntryCode


def jit(function: Function) -> Any:
    """Compile a function that is always inlined into compiled callers; Python must not call it.

    The function has no Python wrapper, since wrappers of helpers doubled the kernel's compile time, and no reference
    counts, since nothing here allocates.
    """
    return numba.njit(**_OPTIONS, **_INSIDE, forceinline=True, pipeline_class=_HelperCompiler)(function)


def jit_cold(function: Function) -> Any:
    """Compile a rarely called function for compiled callers; it is not inlined, so that the kernel compiles faster.

    Without ``forceinline=False``, Numba inlines it where an inlined function calls it.
    """
    return numba.njit(**_OPTIONS, **_INSIDE, forceinline=False, pipeline_class=_HelperCompiler)(function)


_POINTERS: dict[str, Any] = {}
"""Types of pointers by their names."""


class _Pointer(types.Type):  # type: ignore[misc]
    """The type of a pointer to a named tuple that does not change."""

    def __init__(self, target: Any) -> None:
        self.target = target
        # Symbols contain the names of types, and that of the kernel's state has 20 kB.
        digest = hashlib.sha256(target.name.encode()).hexdigest()[:10]
        super().__init__(name=f"Pointer({target.instance_class.__name__} {digest})")
        _POINTERS.setdefault(self.name, self)


@register_model(_Pointer)
class _PointerModel(PrimitiveModel):  # type: ignore[misc]
    def __init__(self, models: Any, pointer: _Pointer) -> None:
        super().__init__(models, pointer, models.lookup(pointer.target).get_value_type().as_pointer())


@infer_getattr
class _PointerMembers(AttributeTemplate):  # type: ignore[misc]
    key = _Pointer

    def generic_resolve(self, pointer: _Pointer, name: str) -> Any:
        """Return the type of a member, a pointer if it is a named tuple itself (Numba's interface)."""
        if name not in pointer.target.fields:
            return None
        member = pointer.target[pointer.target.fields.index(name)]
        return _Pointer(member) if isinstance(member, types.BaseNamedTuple) else member


@lower_getattr_generic(_Pointer)  # type: ignore[untyped-decorator]
def _read_member(_context: Any, builder: Any, pointer: _Pointer, address: Any, name: str) -> Any:
    at = pointer.target.fields.index(name)
    member = cgutils.gep_inbounds(builder, address, 0, at)
    return member if isinstance(pointer.target[at], types.BaseNamedTuple) else _load(builder, member)


def _load(builder: Any, address: Any) -> Any:
    """Load a value part by part, so that the compiler drops the parts that no code reads."""
    kind = address.type.pointee
    if not isinstance(kind, ir.Aggregate):
        value = builder.load(address)
        value.set_metadata("invariant.load", builder.module.add_metadata(()))
        return value
    value = ir.Constant(kind, ir.Undefined)
    for part in range(len(kind)):
        value = builder.insert_value(value, _load(builder, cgutils.gep_inbounds(builder, address, 0, part)), part)
    return value


def _point(_context: Any, target: Any) -> Any:
    def store(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        address = cgutils.alloca_once_value(builder, arguments[0])
        # The empty assembly keeps the compiler from moving an invariant load in front of the store.
        kind = ir.FunctionType(address.type, [address.type])
        return builder.asm(kind, "", "=r,0,~{memory}", [address], side_effect=True)

    return _Pointer(target)(target), store


class _Address(types.Type):  # type: ignore[misc]
    """The type of a pointer of this name in signatures that are saved: it does not contain the named tuple's."""


@register_model(_Address)
class _AddressModel(PrimitiveModel):  # type: ignore[misc]
    def __init__(self, models: Any, address: _Address) -> None:
        super().__init__(models, address, cgutils.voidptr_t)


def _to_address(_context: Any, pointer: Any) -> Any:
    return _Address(pointer.name)(pointer), _cast


def _from_address(_context: Any, address: Any) -> Any:
    return _POINTERS[address.name](address), _cast


def _cast(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))


def address_type(target: Any) -> Any:
    """Return the type of ``address_of`` a named tuple of a compiled type."""
    return _Address(_Pointer(target).name)


def _unchanged(value: Any) -> Any:
    return value


address_of: Function = _unchanged if DISABLED else intrinsic(_to_address)
"""Return a pointer as an address: an argument of functions that the compiled caller itself gets as an argument."""

at_address: Function = _unchanged if DISABLED else intrinsic(_from_address)
"""Return the pointer of an address."""

by_pointer: Function = _unchanged if DISABLED else intrinsic(_point)
"""Return a named tuple as a pointer to a copy of it, which is valid until the compiled caller returns.

A call then passes one pointer. The members of the kernel's state are arrays of seven parts each: to pass them one by
one tripled the kernel's compile time.
"""


def compile_now(function: Function, signature: Any, *, cached: bool, options: dict[str, Any] = _OPTIONS) -> Any:
    """Compile a function for one signature, or load it from disk if ``cached``. Numba's errors are passed on."""
    dispatcher = numba.njit(**options, pipeline_class=_EntryCompiler)(function)
    if DISABLED:
        return dispatcher
    if cached:
        _enable_cache(dispatcher, function)
    try:
        dispatcher.compile(signature)
    except Exception:
        if not cached:
            raise
        dispatcher = _recompile(function, signature, options)
    dispatcher.disable_compile()
    return dispatcher


def compile_argument(function: Function, signature: Any) -> Any:
    """Compile a function that Python only passes to compiled code, or load it from disk."""
    return compile_now(function, signature, cached=True, options=_OPTIONS | {"no_cpython_wrapper": True})


def _recompile(function: Function, signature: Any, options: dict[str, Any]) -> Any:
    """Remove the function's cache files, which may be damaged (full disk, killed writer), and compile it."""
    for path in cache_folder().glob(f"*{function.__qualname__}-*"):
        path.unlink(missing_ok=True)
    dispatcher = numba.njit(**options, pipeline_class=_EntryCompiler)(function)
    _enable_cache(dispatcher, function)
    dispatcher.compile(signature)
    return dispatcher


def _enable_cache(dispatcher: Any, function: Function) -> None:
    try:
        dispatcher._cache = _Cache(function)  # noqa: SLF001
    except (OSError, RuntimeError):
        return  # a read-only home folder: compile every time


def is_cached(name: str) -> bool:
    """Return whether the cache has a compiled function whose name contains ``name``."""
    return any(name in path.name for path in cache_folder().glob("*.nbi"))


def function_type(signature: Any) -> Any:
    """Return the compiled type of an argument that is a function of this signature."""
    return types.FunctionType(signature)


def type_of(value: Any) -> Any:
    """Return the compiled type of a value."""
    return numba.typeof(value)


def none(*arguments: Any) -> Any:
    """Return the signature of a compiled function that takes these arguments and returns nothing."""
    return types.void(*arguments)
