"""A toy language model: its tokens are exact text, and its next token is a hash of all before it.

Token ids are bytes (0 to 255), short ASCII runs (a space or none, then up to three characters, packed into the
id), or one of a few special ones. Text of any kind becomes ids and the very same text again. Characters
outside ASCII are as many ids as bytes, so that cuts fall inside characters. What the model writes is valid
UTF-8, and any server with the same model name continues it in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

BEGIN = 1 << 29
"""Stands behind every prompt that came as text: an answer begins."""
END = BEGIN + 1
"""End of the answer; a token as others are, without text."""
_FIXED = BEGIN + 16
"""And so many more: the answer will have so many tokens."""
MOST_ID = _FIXED + (1 << 28)

_MASK = (1 << 64) - 1
_MARK = rb"<out:(0|[1-9]\d{0,7})>"
_PIECES = re.compile(_MARK + rb"| ?(?:(?!<out:\d)[!-~]){1,3}|[\x00-\xff]")
_CHARACTERS = tuple(c.encode() for c in "éßüاж中文字€🙂🚀")
_CONSONANTS, _VOWELS = b"bdfghjklmnprstvw", b"aeio"


def encode(text: str) -> list[int]:
    """Token ids of a text; ``<out:120>`` in it is one token that fixes the answer's length."""
    return [_id(found) for found in _PIECES.finditer(text.encode("utf-8", "surrogatepass"))]


def _id(found: re.Match[bytes]) -> int:
    return _FIXED + int(found[1]) if found[1] else pack(found[0])


def pack(piece: bytes) -> int:
    """The id of a single byte or of a run of up to four ASCII characters."""
    if len(piece) == 1:
        return piece[0]
    number = 0
    for byte in piece:
        number = number << 7 | byte
    return 256 + number


def spelled(token: int) -> bytes:
    """The bytes of an id."""
    if token < 256:
        return bytes((token,))
    if token >= _FIXED:
        return b"<out:%d>" % (token - _FIXED)
    if token >= BEGIN:
        return b""
    number, piece = token - 256, bytearray()
    while number:
        piece.append(number & 127)
        number >>= 7
    return bytes(reversed(piece))


def decode(ids: Iterable[int]) -> str:
    """The text of token ids; what is no UTF-8 becomes U+FFFD."""
    return b"".join(map(spelled, ids)).decode("utf-8", "replace")


class Mind:
    """What the model knows after reading ids: enough to tell the next one.

    Args:
        model: Its name, which is its weights.
        ids: Read at once.
        mean_tokens: Mean length of answers whose length nothing fixes.
    """

    __slots__ = ("_hash", "_mean", "fixed", "tail", "written")

    def __init__(self, model: str, ids: Sequence[int] = (), mean_tokens: int = 64) -> None:
        self._hash = 0
        for byte in model.encode():
            self._hash = _mixed(self._hash, byte)
        self._mean = max(1, mean_tokens)
        self.tail = b""
        """The bytes of a character that has begun and not ended."""
        self.written = 0
        """Tokens since the answer began."""
        self.fixed: int | None = None
        """How many it will have, where that is fixed."""
        self.read(ids)

    def read(self, ids: Iterable[int]) -> None:
        """Takes further tokens in."""
        for token in ids:
            self._hash = _mixed(self._hash, token)
            self.written += 1
            if token == BEGIN:
                self.written = 0
            elif token >= _FIXED:
                self.fixed = token - _FIXED
            self.tail = _unfinished(self.tail + bytes((token,))) if 0x80 <= token < 256 else b""

    def next(self, *, ends: bool = True) -> int:
        """The next token; END only where it ``ends``."""
        if ends and self._ends():
            return END
        if begun := [c for c in _CHARACTERS if self.tail and c.startswith(self.tail)]:
            return begun[self._draw(2) % len(begun)][len(self.tail)]
        if self._draw(3) % 8 == 0 and (self.fixed is None or self.fixed - self.written > 5):
            return _CHARACTERS[self._draw(4) % len(_CHARACTERS)][0]
        return self._word()

    def _ends(self) -> bool:
        if self.fixed is not None:
            return self.written + 1 >= self.fixed
        return not self.tail and self.written > 0 and self._draw(1) % self._mean == 0

    def _word(self) -> int:
        a = self._draw(5)
        letters = (_CONSONANTS[a % 16], _VOWELS[a // 16 % 4], _CONSONANTS[a // 64 % 16])
        return pack(b" " + bytes(letters))

    def _draw(self, salt: int) -> int:
        return _mixed(self._hash, -salt) >> 8


def _mixed(value: int, by: int) -> int:
    value = ((value ^ (by & _MASK)) + 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


def _unfinished(tail: bytes) -> bytes:
    """The tail, if it is the beginning of a character; else nothing."""
    return tail if any(c.startswith(tail) and c != tail for c in _CHARACTERS) else b""
