"""Arrays as text: exact to the bit, small enough for the footer of a Parquet file."""

from __future__ import annotations

import base64
import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
_KINDS = frozenset("bif")
_MOST_BYTES = 1 << 32


def packed(value: Any) -> Any:
    """A record of columns as plain JSON: arrays become {"dtype", "length", "zlib"}, None stays."""
    if value is None:
        return None
    return {f.name: _item(getattr(value, f.name)) for f in dataclasses.fields(value)}


def unpacked(made: type[T], text: Mapping[str, Any] | None) -> T:
    """The record that was packed; KeyError, ValueError or TypeError where it is not one."""
    if text is None:
        raise ValueError(f"{made.__name__} is missing")
    fields = [f.name for f in dataclasses.fields(made)]  # type: ignore[arg-type]
    return made(**{name: _value(text[name]) for name in fields})


def _item(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value.item() if isinstance(value, np.generic) else value
    plain = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
    text = base64.b64encode(zlib.compress(plain.tobytes(), 6)).decode()
    return {"dtype": plain.dtype.str, "length": len(plain), "zlib": text}


def _value(item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    dtype, length = np.dtype(item["dtype"]), int(item["length"])
    if dtype.kind not in _KINDS or not 0 <= length * dtype.itemsize <= _MOST_BYTES:
        raise ValueError(f"an array of {length} x {dtype} is none of ours")
    inflate = zlib.decompressobj()
    data = inflate.decompress(base64.b64decode(item["zlib"], validate=True), length * dtype.itemsize + 1)
    array = np.frombuffer(data, dtype)  # a length that does not divide raises
    if len(array) != length:
        raise ValueError(f"an array of {length} numbers holds {len(array)}")
    return array.astype(dtype.newbyteorder("="))
