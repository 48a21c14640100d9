"""How deep JSON is nested and of how much it is made, before anybody decodes it.

A few bytes of JSON make an object that takes a hundred times as long to build: what is counted here bounds that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lengthwise.gateway.config import Limits

_MARKS = b'"[]{},'
_OTHERS = bytes(set(range(256)) - set(_MARKS))
_STEP = np.zeros(256, np.int32)
_STEP[list(b"[{")] = 1
_STEP[list(b"]}")] = -1
_PIECE = 1 << 18
_OBJECTS, _TEXTS = 16, 32
"""For each message that there may be; a message takes 1 object and 4 texts, with parts and calls three times that."""
_MESSAGES = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """The most that a body may be made of.

    Attributes:
        levels: Lists and objects in one another.
        objects: Lists and objects in all.
        texts: Texts in all, names of fields included.
        values: Members of lists and fields of objects in all.
    """

    levels: int
    objects: int
    texts: int
    values: int

    @staticmethod
    def of(limits: Limits) -> Shape:
        """By the limits."""
        return _shape(limits.depth, limits.messages, limits.values)


@lru_cache(8)
def _shape(depth: int, most_messages: int, values: int) -> Shape:
    messages = max(most_messages, _MESSAGES)
    return Shape(depth, _OBJECTS * messages, _TEXTS * messages, values)


def beyond(body: bytes, most: Shape) -> str:
    """Which of the most that there may be ("levels", ...) a body is beyond, "" none.

    Exact for every valid JSON; text that is none is refused by the decoder, which comes after.
    """
    is_short = len(body) <= min(most.objects, most.texts, most.values)
    if is_short and body.count(b"[") + body.count(b"{") <= most.levels:
        return ""
    quotes = depth = objects = values = 0
    for piece in _marks(body):
        is_quote = piece == ord('"')
        inside = (np.cumsum(is_quote, dtype=np.int32) + (quotes & 1)) & 1
        step = np.where(inside, 0, _STEP[piece])
        level = depth + np.cumsum(step, dtype=np.int32)
        if level.max() > most.levels:
            return "levels"
        quotes, depth = quotes + int(np.count_nonzero(is_quote)), int(level[-1])
        objects += int(np.count_nonzero(step > 0))
        values += int(np.count_nonzero((piece == ord(",")) & (inside == 0)))
        told = {"objects": objects, "texts": (quotes + 1) // 2, "values": values + 1}
        for name, count in told.items():
            if count > getattr(most, name):
                return name
    return ""


def _marks(body: bytes) -> Iterator[npt.NDArray[np.uint8]]:
    """All brackets, commas and quotation marks, those behind a backslash left out, some at a time."""
    at = 0
    while at < len(body):
        piece = body[at : at + _PIECE]
        slashes = len(piece) - len(piece.rstrip(b"\\"))
        if slashes % 2:  # what it stands before belongs to it
            piece = body[at : at + len(piece) + 1]
        at += len(piece)
        marks = piece.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _OTHERS)
        if marks:
            yield np.frombuffer(marks, np.uint8)
