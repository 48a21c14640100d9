"""One output as it is written: tokens from the batch become text, ids and an end."""

from __future__ import annotations

import asyncio
import codecs
from dataclasses import dataclass

from lengthwise.testing.engine_server.asked import Asked
from lengthwise.testing.engine_server.spec import EngineSpec
from lengthwise.testing.engine_server.toy_model import BEGIN, END, Mind, spelled


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new: text that can be shown, ids, the numbers so far, and the reason if it is the last."""

    text: str
    ids: list[int]
    total_tokens: int
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Writing:
    """The model writes a token whenever the batch has run one.

    Text is held back as vLLM does: bytes until their character is whole, and as many characters as could be
    the beginning of a stop string. A character that is not whole at the end is not shown; the continuation of
    its ids shows it.

    Attributes:
        ids: All generated so far.
        told: How many of them have been taken.
        finish_reason: "stop", "length" or "abort" in the end.
    """

    def __init__(self, asked: Asked, spec: EngineSpec, choice: int, stirred: asyncio.Event) -> None:
        self._asked, self._stirred = asked, stirred
        self._mind = Mind(
            f"{spec.model}#{choice}" if choice else spec.model, asked.prompt_ids, spec.mean_tokens
        )
        if BEGIN not in asked.prompt_ids:
            self._mind.written = 0
        if asked.fixed_tokens is not None:
            self._mind.fixed = asked.fixed_tokens
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._bytes.decode(self._mind.tail)
        self.ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._text = ""
        self._marks: list[int] = []
        self._shown = self.told = 0
        self._over = False

    def on_token(self, _now_s: float) -> bool:
        """One more; True where it is the last."""
        asked = self._asked
        ends = asked.ends and len(self.ids) + 1 > asked.least_tokens
        token = self._mind.next(ends=ends)
        self._mind.read((token,))
        self.ids.append(token)
        self._text += self._bytes.decode(spelled(token))
        self._marks.append(len(self._text))
        self._finish(token)
        self._stirred.set()
        return self.finish_reason is not None

    def _finish(self, token: int) -> None:
        if token == END:
            self.finish_reason = "stop"
        elif token in self._asked.stop_ids:
            self.finish_reason, self.stop_reason = "stop", token
        elif len(self.ids) > self._asked.least_tokens and (found := self._stopped()) is not None:
            self.finish_reason, self.stop_reason = "stop", found
        elif len(self.ids) == self._asked.most_tokens:
            self.finish_reason = "length"

    def _stopped(self) -> str | None:
        """The first stop string in the text, which is cut before it."""
        places = [(at, s) for s in self._asked.stop if (at := self._text.find(s)) >= 0]
        if not places:
            return None
        at, found = min(places)
        self._text = self._text[:at]
        return found

    def next_size(self) -> int | None:
        """Tokens of the piece that is due; None: none is yet, or all have been taken."""
        fresh, least = len(self.ids) - self.told, self._asked.interval if self.told else 1
        if fresh >= least:
            return least
        return fresh if self.finish_reason and not self._over else None

    def take(self, most: int = 1 << 30) -> Piece:
        """What is new since it was last asked, so many tokens of it at most."""
        until = min(len(self.ids), self.told + most)
        self._over = self.finish_reason is not None and until == len(self.ids)
        ids, self.told = self.ids[self.told : until], until
        if not self._over:
            return Piece(self._show(ids), ids, until)
        return Piece(self._show(ids), ids, until, self.finish_reason, self.stop_reason)

    def _show(self, ids: list[int]) -> str:
        """The text that can be shown with these tokens, what was held back before included."""
        shown, end = self._shown, len(self._text)
        if not self._over:
            held = max((len(s) - 1 for s in self._asked.stop), default=0)
            known = self._marks[self.told - 1] if ids else shown
            end = max(shown, min(known, end) - held)
        self._shown = end
        return self._text[shown:end]
