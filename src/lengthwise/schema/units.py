"""Sizes of things, and the bytes behind the name of a dtype."""

from __future__ import annotations

from lengthwise.schema.errors import UnknownNameError

KIB, MIB, GIB = 2**10, 2**20, 2**30
GB, TFLOP = 1e9, 1e12

DTYPE_BYTES: dict[str, float] = {
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "fp4": 0.5,
    "int4": 0.5,
}
_ALIASES = {
    "fp32": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "w8a8": "int8",
    "w4a16": "int4",
    "awq": "int4",
    "gptq": "int4",
    "nvfp4": "fp4",
    "mxfp4": "fp4",
}


def dtype_name(name: str) -> str:
    """The one spelling of a dtype ("bf16" -> "bfloat16"); raises UnknownNameError."""
    name = _ALIASES.get(name.lower(), name.lower())
    if name not in DTYPE_BYTES:
        raise UnknownNameError("dtype", name, [*DTYPE_BYTES, *_ALIASES])
    return name


def dtype_bytes(name: str) -> float:
    """Bytes of one element, scales of block formats left out; raises UnknownNameError."""
    return DTYPE_BYTES[dtype_name(name)]
