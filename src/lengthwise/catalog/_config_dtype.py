"""The dtype in which a Hugging Face config says its weights are stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lengthwise.catalog._config_keys import ConfigKeys
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.units import dtype_name

_BY_NAME = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "fp4", "nvfp4": "fp4"}
_BY_BITS = {
    ("int", 4): "int4",
    ("int", 8): "int8",
    ("float", 4): "fp4",
    ("float", 8): "fp8",
}


def weight_dtype(keys: ConfigKeys) -> str:
    """The one spelling of the weights' dtype; a quantised one is that of the layers.

    A config that names none is taken as bfloat16, in which engines load such weights.

    Raises:
        InputError: The dtype or the way of quantising is none that is known.
    """
    quantised = keys.find("quantization_config")
    if isinstance(quantised, Mapping):
        return _quantised(quantised, keys.where)
    named = str(keys.find("dtype", "torch_dtype", default="bfloat16")).removeprefix("torch.")
    try:
        return dtype_name("bfloat16" if named == "auto" else named)
    except UnknownNameError as error:
        raise InputError(f"{keys.where}: {error}") from error


def _quantised(table: Mapping[str, Any], where: str) -> str:
    said = [str(table.get(key, "")).lower() for key in ("quant_method", "quant_algo")]
    if known := [dtype for name, dtype in _BY_NAME.items() if any(word.startswith(name) for word in said)]:
        return known[0]
    dtype = _BY_BITS.get(_kind_and_bits(table))
    if dtype is None:
        raise InputError(
            f"{where}: quantization_config must be fp8, awq, gptq, compressed-tensors, bitsandbytes, mxfp4 "
            f"or modelopt with 4 or 8 bits; it is {dict(table)}. Remove it and set weight_dtype",
        )
    return dtype


def _kind_and_bits(table: Mapping[str, Any]) -> tuple[str, int]:
    """What a weight is ("int" or "float") and its bits (0: not said)."""
    if groups := table.get("config_groups"):
        weights = next(iter(groups.values())).get("weights") or {}
        return str(weights.get("type", "int")), weights.get("num_bits") or 0
    if table.get("load_in_4bit") or table.get("load_in_8bit"):
        return "int", 4 if table.get("load_in_4bit") else 8
    return "int", table.get("bits") or table.get("w_bit") or 0
