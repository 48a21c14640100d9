"""What the gateway and the process of a predictor say to each other."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np

from lengthwise.gateway.forecast._asking import Said
from lengthwise.gateway.forecast._belief import sound
from lengthwise.predict.distribution import LEVELS

LENGTH = struct.Struct("<I")
MOST_ANSWER_BYTES = 1 << 22
_HEAD = struct.Struct("<II")
_ROW_BYTES = 8 * len(LEVELS)


class Rubbish(Exception):  # noqa: N818 - what came, and the process that sent it is ended for it
    """What came is no answer to what was asked."""


def framed(payload: bytes) -> bytes:
    """The payload after its length."""
    return LENGTH.pack(len(payload)) + payload


def told(number: int, said: Said) -> bytes:
    """Answers as bytes."""
    beside = json.dumps({"faults": said.faults, "error": said.error}).encode()
    rows = np.ascontiguousarray(said.rows, "<f8")
    good = np.ascontiguousarray(said.good, np.uint8)
    return _HEAD.pack(number, len(said.good)) + good.tobytes() + rows.tobytes() + beside


def heard(payload: bytes, number: int, n: int) -> Said:
    """The answers to n questions; Rubbish where it is none."""
    start, end = _HEAD.size + n, _HEAD.size + n + n * _ROW_BYTES
    if len(payload) < end or _HEAD.unpack_from(payload) != (number, n):
        raise Rubbish(f"an answer to batch {number} of {n} was expected")
    good = np.frombuffer(payload, np.uint8, n, _HEAD.size) == 1
    rows = np.frombuffer(payload, "<f8", n * len(LEVELS), start).reshape(n, len(LEVELS))
    if not all(sound(row) for row in rows[good]):
        raise Rubbish("rows that are no distributions")
    beside = _object(payload[end:])
    faults = beside.get("faults")
    counted = (
        {str(k): int(v) for k, v in faults.items() if isinstance(v, int)} if isinstance(faults, dict) else {}
    )
    error = beside.get("error")
    return Said(rows, good, counted, None if error is None else str(error))


def greeting(payload: bytes) -> dict[str, Any]:
    """What a process says when it is ready, or cannot be; Rubbish where it is something else."""
    found = _object(payload)
    if not isinstance(found.get("seconds"), float) and not isinstance(found.get("refused"), str):
        raise Rubbish("a greeting was expected")
    return found


def _object(payload: bytes) -> dict[str, Any]:
    try:
        found = json.loads(payload)
    except ValueError:
        raise Rubbish("no JSON") from None
    if not isinstance(found, dict):
        raise Rubbish("no JSON object")
    return found
