"""What a request holds in memory: some times as much as came over the wire."""

from __future__ import annotations

import sys

_TEXT_BYTES, _VALUE_BYTES, _OBJECT_BYTES = 60, 40, 120
"""What a text, a member or field, and a list or object take beside their letters once parsed by CPython."""

_OTHERS = bytes(set(range(256)) - set(b'",{['))
_BEYOND = (b"\\ud", b"\\uD", *(bytes([first]) for first in range(0xF0, 0xF5)))
"""What a letter beyond U+FFFF begins with, escaped or in UTF-8."""


def held_bytes(body: bytes, text: str) -> int:
    """About what is held: the body, its prompt as text, and all of its fields parsed; rather too much than too little.

    A text with one letter beyond U+FFFF takes four bytes for each of its letters, with one beyond U+00FF two.

    Args:
        body: As it came.
        text: Its prompt, "" where it has none.
    """
    prompt = sys.getsizeof(text)
    others = max(0, len(body) - len(text)) * _widest(body)
    marks, said = _marks(body), _marks(text.encode(errors="surrogatepass"))
    texts = max(0, marks.count(b'"') - said.count(b'"')) // 2
    values = max(0, marks.count(b",") - said.count(b",")) + 1
    objects = max(0, marks.count(b"{") + marks.count(b"[") - said.count(b"{") - said.count(b"["))
    parsed = prompt + others + _TEXT_BYTES * texts + _VALUE_BYTES * values + _OBJECT_BYTES * objects
    return len(body) + prompt + parsed


def _marks(letters: bytes) -> bytes:
    """Those that tell how much is parsed: to count them in here is faster than in the whole."""
    return letters.translate(None, _OTHERS)


def _widest(body: bytes) -> int:
    """Bytes that a letter of the body may take in a text."""
    if body.isascii() and (b"\\" not in body or b"\\u" not in body):
        return 1
    return 4 if any(mark in body for mark in _BEYOND) else 2
