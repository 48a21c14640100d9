"""Calls machine code from Python without Numba: types and signatures of compiled functions, loading and errors.

A compiled function has the C interface ``_CALL`` with three addresses: the arguments as words of 8 bytes, a buffer for
the results, and a place for the address of a ``_Failure``. It returns an error code; above 0, the failure is set.
"""

from __future__ import annotations

import ctypes
import itertools
import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

Function = Callable[..., Any]

_CALL = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p)
ENTRY, NATIVE = "lengthwise_entry", "lengthwise_native"
"""Symbols of a compiled function: ENTRY has the interface ``_CALL``, NATIVE has Numba's, for compiled callers."""


@dataclass(frozen=True)
class Scalar:
    """A number: "float64", "int64" or "bool". A call with types of arguments returns a signature with this result."""

    name: str

    def __call__(self, *arguments: Type) -> Signature:
        return Signature((self,), arguments)

    @property
    def layout(self) -> str:
        """Return the format of the words (``struct``)."""
        return "d" if self.name == "float64" else "q"

    def add_words(self, value: Any, words: list[Any]) -> None:
        """Add the words that represent a value."""
        words.append(value)


@dataclass(frozen=True)
class Array:
    """A C-contiguous, aligned, writeable array."""

    dtype: np.dtype[Any]
    ndim: int

    @property
    def layout(self) -> str:
        """Return the format of the words: the address and the shape."""
        return "q" * (1 + self.ndim)

    def add_words(self, value: Any, words: list[Any]) -> None:
        """Add the words that represent a value. Raises TypeError if it is another kind of array."""
        if not isinstance(value, np.ndarray) or value.dtype != self.dtype or value.ndim != self.ndim:
            other = type_of(value) if isinstance(value, np.ndarray) else repr(value)
            raise TypeError(f"a compiled function takes {self} here; got {other}")
        if not value.flags.carray:
            raise TypeError("a compiled function takes aligned, writeable arrays without gaps")
        is_plain = value.size and self.dtype.names is None  # for these, ``from_buffer`` is four times faster
        words.append(ctypes.addressof(ctypes.c_char.from_buffer(value.data)) if is_plain else value.ctypes.data)
        words.extend(value.shape)


@dataclass(frozen=True)
class Tuple:
    """A tuple, or a named tuple of class ``kind``. A call with types of arguments returns a signature, as of Scalar."""

    members: tuple[Type, ...]
    kind: type[Any] | None = None

    def __call__(self, *arguments: Type) -> Signature:
        return Signature(self.members, arguments, is_tuple=True)

    @property
    def layout(self) -> str:
        """Return the format of the words."""
        return "".join(member.layout for member in self.members)

    def add_words(self, value: Any, words: list[Any]) -> None:
        """Add the words that represent a value."""
        for member, part in zip(self.members, value, strict=True):
            member.add_words(part, words)


@dataclass(frozen=True)
class Pointer:
    """The type of an argument that is a compiled function of this signature."""

    signature: Signature
    layout = "q"

    def add_words(self, value: Any, words: list[Any]) -> None:
        """Add the word that represents a function. Raises TypeError unless it is compiled for this signature."""
        if not isinstance(value, Compiled) or value.signature.key != self.signature.key:
            raise TypeError(f"a compiled function takes a compiled function here; got {value!r}")
        words.append(value.address)


@dataclass(frozen=True)
class Reference:
    """The type of a named tuple that is passed by pointer. Only compiled callers have such values (``by_pointer``)."""

    target: Tuple
    layout = "q"

    def add_words(self, value: Any, _words: list[Any]) -> None:
        """Raise TypeError: Python has no such value."""
        raise TypeError(f"only compiled functions call a function that takes a pointer; got {value!r}")


Type = Scalar | Array | Tuple | Pointer | Reference


@dataclass(frozen=True)
class Signature:
    """The types of the results (several for a tuple, none for a function without a result) and of the arguments."""

    results: tuple[Type, ...]
    arguments: tuple[Type, ...]
    is_tuple: bool = False

    @cached_property
    def key(self) -> str:
        """Return a text that differs between signatures."""
        return repr(self)


f8, i8, _boolean = Scalar("float64"), Scalar("int64"), Scalar("bool")
f8_1d, i8_1d, i8_2d = Array(np.dtype("f8"), 1), Array(np.dtype("i8"), 1), Array(np.dtype("i8"), 2)
pair_of_floats, triple_of_ints = Tuple((f8, f8)), Tuple((i8, i8, i8))


def none(*arguments: Type) -> Signature:
    """Return the signature of a compiled function that takes these arguments and returns nothing."""
    return Signature((), arguments)


function_type, pointer_to = Pointer, Reference


def type_of(value: Any) -> Type:
    """Return the compiled type of a number, an array, or a tuple of these. Raises TypeError for other values."""
    if isinstance(value, np.ndarray):
        return Array(value.dtype, value.ndim)
    if isinstance(value, tuple):
        return Tuple(tuple(map(type_of, value)), type(value) if hasattr(value, "_fields") else None)
    for kind, scalar in ((bool, _boolean), (int, i8), (float, f8)):
        if isinstance(value, kind):
            return scalar
    raise TypeError(f"a compiled function takes numbers, arrays, tuples and compiled functions; got {value!r}")


@dataclass(eq=False)
class Helper:
    """A function that only compiled functions call. ``_compiler`` sets Numba's ``dispatcher`` at the first use."""

    function: Function
    inline: bool
    dispatcher: Any = None


def by_pointer(value: Any) -> Any:
    """Return a pointer to a copy of a named tuple, which is valid until the compiled caller returns.

    Calls then pass one pointer. Without it they pass each member of the kernel's state, and each is an array of seven
    parts, which triples the kernel's compile time. Interpreted, the function returns the tuple itself.
    """
    return value


class Compiled:
    """A compiled function. A call releases the GIL, so that other threads run meanwhile."""

    def __init__(self, name: str, signature: Signature, code: bytes, symbols: Mapping[str, int]) -> None:
        self.name, self.signature = name, signature
        self._library = _link(code, symbols)  # The code stays in memory as long as this object exists.
        self.address: int = self._library[NATIVE]
        self._entry = _CALL(self._library[ENTRY])
        self._arguments = Tuple(signature.arguments)
        self._words = struct.Struct(self._arguments.layout)
        self._results = struct.Struct("".join(result.layout for result in signature.results))

    def __repr__(self) -> str:
        return f"<compiled {self.name}>"

    def __call__(self, *arguments: Any) -> Any:
        parts: list[Any] = []
        try:
            self._arguments.add_words(arguments, parts)
            words = self._words.pack(*parts)
        except (ValueError, struct.error) as error:
            raise TypeError(
                f"{self} takes the {len(self.signature.arguments)} arguments of its type: {error}"
            ) from error
        results, failure = ctypes.create_string_buffer(self._results.size), ctypes.POINTER(_Failure)()
        if self._entry(words, results, ctypes.addressof(failure)) > 0:
            raise failure.contents.exception()
        values = self._results.unpack(results.raw[: self._results.size])
        return values if self.signature.is_tuple else values[0] if values else None


class _Failure(ctypes.Structure):
    """An exception of compiled code. At compile time, Numba pickles its class, its arguments and its source line."""

    _fields_ = [("pickled", ctypes.c_void_p), ("size", ctypes.c_int32)]

    def exception(self) -> BaseException:
        """Return the exception. A note names the function, the file and the line, if they are known."""
        kind, arguments, place = pickle.loads(ctypes.string_at(self.pickled, self.size))  # noqa: S301  of own code
        exception: BaseException = kind(*arguments)
        if place:
            exception.add_note('in compiled function {}, file "{}", line {}'.format(*place))
        return exception


_NUMBERS = itertools.count()


@cache
def _linker() -> Any:
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.create_lljit_compiler(suppress_errors=True)


def _link(code: bytes, symbols: Mapping[str, int]) -> Any:
    """Load machine code and return the addresses of its symbols. Raises RuntimeError if symbols are missing."""
    from llvmlite import binding

    library = binding.JITLibraryBuilder().add_object_img(code).add_current_process()
    for name, address in symbols.items():
        library.import_symbol(name, address)
    return library.export_symbol(ENTRY).export_symbol(NATIVE).link(_linker(), f"lengthwise {next(_NUMBERS)}")
