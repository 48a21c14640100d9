"""What happened to one request, as it happens."""

from __future__ import annotations

from dataclasses import dataclass, field

from lengthwise.backend.openai import Piece, RequestError, Usage
from lengthwise.schema.records import Status

LIED = "lied usage"
EMPTY = "empty answer"
_TIMED_OUT = frozenset({"timed out", "stalled"})
LOST = frozenset({"refused", "reset", "closed early", "no connection", *_TIMED_OUT})
"""Failures of a server that is not there any more."""


@dataclass(slots=True)
class Row:
    """Times are on the clock of ``time.perf_counter``.

    Attributes:
        due_s: When it was to be sent.
        wanted_tokens: Output tokens asked for.
        sent_s: When its headers went out; None before.
        ended: Whether the answer is over, well or not; False where the run's end cut it off.
        failure: Of what it failed.
    """

    due_s: float
    wanted_tokens: int
    ids: int = 0
    sent_s: float | None = None
    at_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    texts: int = 0
    usage: Usage | None = None
    finish_reason: str | None = None
    ended: bool = False
    failure: RequestError | None = None

    def sent(self, at_s: float) -> None:
        """Told when the headers went out."""
        self.sent_s = at_s

    def take(self, piece: Piece) -> None:
        """Adds a piece of the answer."""
        if piece.is_output:
            self.at_s.append(piece.at_s)
            self.tokens.append(piece.tokens)
            self.texts += bool(piece.text)
        if piece.usage is not None:
            self.usage = piece.usage
        if piece.finish_reason is not None:
            self.finish_reason = piece.finish_reason

    @property
    def status(self) -> Status:
        """The bucket: what a server refuses is rejected, what it is too slow for has timed out."""
        if self.failure is None:
            return Status.FINISHED if self.ended and self.at_s else Status.UNFINISHED
        if self.failure.reason.startswith("http "):
            return Status.REJECTED
        return Status.TIMED_OUT if self.failure.reason in _TIMED_OUT else Status.UNFINISHED

    @property
    def output_tokens(self) -> int:
        """By usage, else by tokens that were told; as many as pieces (at least) where neither can be believed."""
        if self.usage is not None and self._whole and not self.lied_of_output:
            return self.usage.output_tokens
        return sum(self.counts) or len(self.at_s)

    @property
    def counts(self) -> list[int]:
        """Tokens of each piece, 0 where nobody told; where only the sum is told and they are as many, one each."""
        if self.lied_of_output:
            return [0] * len(self.tokens)
        even = self.usage is not None and self.usage.output_tokens == len(self.at_s) and not any(self.tokens)
        return [1] * len(self.tokens) if even else self.tokens

    @property
    def lied_of_output(self) -> bool:
        """Whether the number of output tokens cannot be true: above what was asked for, or below what came."""
        if self.usage is None or not self._whole:
            return False
        told, said = sum(self.tokens), self.usage.output_tokens
        cut = self.finish_reason == "length" and said < self.wanted_tokens
        return said > self.wanted_tokens or said < self.texts or (0 < told != said) or cut

    @property
    def lied_of_prompt(self) -> bool:
        """Whether the number of prompt tokens is another than of the token ids that were sent."""
        return self.usage is not None and self.ids > 0 and self.usage.prompt_tokens not in {self.ids, 0}

    @property
    def _whole(self) -> bool:
        return self.ended and self.failure is None

    @property
    def reason(self) -> str:
        """What it failed of; "" where it did not."""
        if self.failure is not None:
            return self.failure.reason
        if self.ended and not self.at_s:
            return EMPTY
        return LIED if self.lied_of_output or self.lied_of_prompt else ""
