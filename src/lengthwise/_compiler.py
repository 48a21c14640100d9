"""Compiles functions with Numba to machine code that ``_native`` loads without Numba.

Methods without a docstring implement Numba's interfaces for extensions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numba
from llvmlite import ir
from numba import _dynfunc, _helperlib, types
from numba.core import cgutils
from numba.core.callconv import excinfo_ptr_t
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.compiler_lock import global_compiler_lock
from numba.core.datamodel.models import PrimitiveModel
from numba.core.typing import signature as typed_call
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate, infer_getattr, infer_global
from numba.extending import lower_builtin, lower_getattr_generic, register_model, typeof_impl
from numba.np import numpy_support
from numba.np.arrayobj import populate_array

from lengthwise import _native

_OPTIONS: dict[str, Any] = {
    "nogil": True, "error_model": "python", "_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True,
}  # fmt: skip
_WORD, _DOUBLE = ir.IntType(64), ir.DoubleType()


class _HelperCode(JITCodeLibrary):  # type: ignore[misc]
    """The code of one function, which becomes machine code only as a part of ``compile_code``'s function.

    Numba's own library links each function with all its callees, optimizes the result and generates machine code, and
    does so again in each caller.
    """

    def finalize(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, _name: str) -> int:
        return 0  # there is no machine code

    @property
    def codegen(self) -> Any:
        return self  # Numba calls only ``set_env``

    def set_env(self, name: str, environment: Any) -> None:
        """Ignore an environment, which only code with Python objects reads."""


class _HelperCompiler(Compiler):  # type: ignore[misc]
    def compile_extra(self, function: _native.Function) -> Any:
        self.state.library = _HelperCode(self.state.targetctx.codegen(), function.__qualname__)
        return super().compile_extra(function)


def _dispatcher(function: _native.Function, **options: Any) -> Any:
    return numba.njit(**_OPTIONS, **options, pipeline_class=_HelperCompiler)(function)


@typeof_impl.register(_native.Helper)  # type: ignore[untyped-decorator]
def _type_of_helper(helper: _native.Helper, _context: Any) -> Any:
    if helper.dispatcher is None:
        # Without ``forceinline=False``, Numba inlines a cold function where an inlined function calls it.
        helper.dispatcher = _dispatcher(helper.function, forceinline=helper.inline)
    return types.Dispatcher(helper.dispatcher)


class _Pointer(types.Type):  # type: ignore[misc]
    """The type of a pointer to a named tuple that does not change."""

    def __init__(self, target: Any) -> None:
        self.target = target
        # Symbols contain the names of types, and the name of the kernel's state has 20 kB.
        digest = hashlib.sha256(target.name.encode()).hexdigest()[:10]
        super().__init__(name=f"Pointer({target.instance_class.__name__} {digest})")


@register_model(_Pointer)
class _PointerModel(PrimitiveModel):  # type: ignore[misc]
    def __init__(self, models: Any, pointer: _Pointer) -> None:
        super().__init__(models, pointer, models.lookup(pointer.target).get_value_type().as_pointer())


@infer_getattr
class _PointerMembers(AttributeTemplate):  # type: ignore[misc]
    key = _Pointer

    def generic_resolve(self, pointer: _Pointer, name: str) -> Any:
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
    """Load each part of a value on its own, so that the compiler drops the parts that no code reads."""
    kind = address.type.pointee
    if not isinstance(kind, ir.Aggregate):
        value = builder.load(address)
        value.set_metadata("invariant.load", builder.module.add_metadata(()))
        return value
    value = ir.Constant(kind, ir.Undefined)
    for part in range(len(kind)):
        value = builder.insert_value(value, _load(builder, cgutils.gep_inbounds(builder, address, 0, part)), part)
    return value


@infer_global(_native.by_pointer)
class _ByPointer(AbstractTemplate):  # type: ignore[misc]
    key = _native.by_pointer

    def generic(self, arguments: Any, _keywords: Any) -> Any:
        return typed_call(_Pointer(arguments[0]), *arguments)


@lower_builtin(_native.by_pointer, types.BaseNamedTuple)  # type: ignore[untyped-decorator]
def _store(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
    address = cgutils.alloca_once_value(builder, arguments[0])
    # Without this empty assembly, the compiler could move an invariant load in front of the store.
    kind = ir.FunctionType(address.type, [address.type])
    return builder.asm(kind, "", "=r,0,~{memory}", [address], side_effect=True)


class _Function(types.Callable):  # type: ignore[misc]
    """The type of an argument that is a function: the address of its machine code.

    Numba's own function type can also call Python functions, so that each call contains code that refers to Numba.
    """

    def __init__(self, signature: Any) -> None:
        self.signature = signature
        super().__init__(name=f"Function{signature}")

    def get_call_type(self, context: Any, args: Any, kws: Any) -> Any:
        del context
        signature = self.signature
        fits = not kws and len(args) == len(signature.args)
        return typed_call(signature.return_type, *signature.args, recvr=self) if fits else None

    def get_call_signatures(self) -> Any:
        return [self.signature], False

    def get_impl_key(self, sig: Any) -> Any:
        del sig
        return type(self)  # ``_call`` is registered under this key


@register_model(_Function)
class _FunctionModel(PrimitiveModel):  # type: ignore[misc]
    def __init__(self, models: Any, function: _Function) -> None:
        super().__init__(models, function, cgutils.voidptr_t)


@lower_builtin(_Function, types.VarArg(types.Any))  # type: ignore[untyped-decorator]
def _call(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    kinds, convention = signature.args[1:], context.call_conv
    native = convention.get_function_type(signature.return_type, kinds).as_pointer()
    status, value = convention.call_function(
        builder, builder.bitcast(arguments[0], native), signature.return_type, kinds, arguments[1:]
    )
    with cgutils.if_unlikely(builder, status.is_error):
        convention.return_status_propagate(builder, status)
    return value


def _numba_type(kind: _native.Type) -> Any:
    match kind:
        case _native.Scalar(name):
            return types.boolean if name == "bool" else getattr(types, name)
        case _native.Array(dtype, ndim):
            return types.Array(numpy_support.from_dtype(dtype), ndim, "C")
        case _native.Tuple(members, named):
            parts = [_numba_type(member) for member in members]
            return types.BaseTuple.from_types(parts, named)
        case _native.Pointer(signature):
            return _Function(_numba_signature(signature))
        case _native.Reference(target):
            return _Pointer(_numba_type(target))


def _numba_signature(signature: _native.Signature) -> Any:
    results = [_numba_type(result) for result in signature.results]
    result = types.BaseTuple.from_types(results) if signature.is_tuple else results[0] if results else types.void
    return result(*map(_numba_type, signature.arguments))


def compile_code(function: _native.Function, signature: _native.Signature) -> bytes:
    """Return the machine code of a function and all its callees. Numba's errors pass through."""
    dispatcher, wanted = _dispatcher(function), _numba_signature(signature)
    dispatcher.compile(wanted)
    compiled = dispatcher.get_compile_result(wanted)
    with global_compiler_lock:
        return _machine_code(compiled, signature)


def _machine_code(compiled: Any, signature: _native.Signature) -> bytes:
    codegen, native = compiled.target_context.codegen(), compiled.fndesc.llvm_func_name
    linked = JITCodeLibrary(codegen, compiled.library.name)
    linked.add_ir_module(_entry(linked.create_ir_module("entry"), compiled, signature))
    libraries = [compiled.library]
    for library in libraries:
        libraries.extend(one for one in library._linking_libraries if one not in libraries)  # noqa: SLF001
    module = linked._final_module  # noqa: SLF001
    for library in libraries:
        module.link_in(library._get_module_for_linking(), preserve=True)  # noqa: SLF001
    module.get_function(native).linkage = "external"
    module.get_function(native).name = _native.NATIVE
    module.get_function("numba_frexp").linkage = "internal"
    linked._optimize_final_module()  # noqa: SLF001
    module.verify()
    code: bytes = codegen._tm.emit_object(module)  # noqa: SLF001
    return code


def _entry(module: Any, compiled: Any, signature: _native.Signature) -> Any:
    """Add the function ENTRY to a module: it reads arguments from words, calls the function and stores the results."""
    context, description = compiled.target_context, compiled.fndesc
    pointers = [_WORD.as_pointer(), _WORD.as_pointer(), excinfo_ptr_t.as_pointer()]
    entry = ir.Function(module, ir.FunctionType(ir.IntType(32), pointers), _native.ENTRY)
    builder = ir.IRBuilder(entry.append_basic_block())
    words_at, returned, failure = entry.args
    words = _Words(context, builder, words_at)
    values = [words.read(kind) for kind in compiled.signature.args]
    native = context.declare_function(module, description)
    status, value = context.call_conv.call_function(builder, native, description.restype, description.argtypes, values)
    builder.store(status.excinfoptr, failure)
    for place in range(len(signature.results)):
        one = builder.extract_value(value, place) if signature.is_tuple else value
        address = builder.gep(returned, [_WORD(place)])
        builder.store(one, builder.bitcast(address, one.type.as_pointer()))
    builder.ret(status.code)
    _add_frexp(module)
    return module


class _Words:
    """Reads arguments from words of 8 bytes, in the order in which ``_native.Compiled`` writes them."""

    def __init__(self, context: Any, builder: Any, address: Any) -> None:
        self._context, self._builder, self._address = context, builder, address
        self._place = 0

    def _next(self, kind: Any = _WORD) -> Any:
        address = self._builder.gep(self._address, [_WORD(self._place)])
        self._place += 1
        return self._builder.load(self._builder.bitcast(address, kind.as_pointer()))

    def read(self, kind: Any) -> Any:
        """Return the next value of a Numba type."""
        if isinstance(kind, types.BaseTuple):
            return self._context.make_tuple(self._builder, kind, [self.read(member) for member in kind])
        if isinstance(kind, types.Array):
            return self._read_array(kind)
        if isinstance(kind, types.Boolean):
            return self._builder.trunc(self._next(), ir.IntType(1))
        return self._next(self._context.get_value_type(kind))

    def _read_array(self, kind: Any) -> Any:
        array = self._context.make_array(kind)(self._context, self._builder)
        item = self._context.get_data_type(kind.dtype)
        data = self._next(item.as_pointer())
        shape = [self._next() for _ in range(kind.ndim)]
        size = self._context.get_abi_sizeof(item)
        strides = [_WORD(size)]
        for length in reversed(shape[1:]):
            strides.insert(0, self._builder.mul(strides[0], length))
        populate_array(array, data=data, shape=shape, strides=strides, itemsize=size, meminfo=None)
        return array._getvalue()  # noqa: SLF001


def _add_frexp(module: Any) -> None:
    """Define ``numba_frexp``, which compiled code calls for ``math.frexp``, as a call of the C library's ``frexp``.

    The machine code then needs no symbol of Numba's own library.
    """
    kind = ir.FunctionType(_DOUBLE, [_DOUBLE, ir.IntType(32).as_pointer()])
    function = ir.Function(module, kind, "numba_frexp")
    builder = ir.IRBuilder(function.append_basic_block())
    builder.ret(builder.call(ir.Function(module, kind, "frexp"), function.args))


def runtime_symbols() -> Mapping[str, int]:
    """Return the addresses of Numba's C functions. Code that calls them runs only in a process with Numba."""
    helpers = _helperlib.c_helpers | _dynfunc.c_helpers  # type: ignore[attr-defined]
    return {f"numba_{name}": address for name, address in helpers.items()}
