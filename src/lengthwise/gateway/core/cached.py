"""Which beginnings of prompts a worker has probably in its cache."""

from __future__ import annotations

from collections import OrderedDict

from lengthwise.gateway.leading import SIZES, Leading

MOST_BLOCKS = 1 << 17
"""Of all workers together: about 25 MB."""
_GROWTH = tuple(size - before for before, size in zip((0, *SIZES), SIZES, strict=False))


class Cached:
    """Hashes of the leading blocks of the prompts that it was sent; the longest unused are forgotten.

    Attributes:
        most: So many hashes at most.
    """

    def __init__(self, most: int = MOST_BLOCKS) -> None:
        self.most = most
        self._tokens_of: OrderedDict[int, float] = OrderedDict()
        self._tokens = 0.0

    def __len__(self) -> int:
        return len(self._tokens_of)

    def tokens(self, leading: Leading) -> float:
        """Leading tokens of a prompt that are probably there."""
        depth = self._depth(leading)
        return SIZES[depth - 1] * leading.block_tokens if depth else 0.0

    def sent(self, leading: Leading, most_tokens: float | None = None) -> float:
        """It is computed there; returns the tokens of it that were there before.

        Args:
            leading: How the prompt begins.
            most_tokens: What the engine's cache holds; None unknown.
        """
        before, known = self.tokens(leading), self._tokens_of
        for depth in range(len(leading.keys) - 1, -1, -1):  # what is shared most is forgotten last
            key = leading.keys[depth]
            if key in known:
                known.move_to_end(key)
            else:
                known[key] = tokens = _GROWTH[depth] * leading.block_tokens
                self._tokens += tokens
        while known and (len(known) > self.most or (most_tokens is not None and self._tokens > most_tokens)):
            self._tokens -= known.popitem(last=False)[1]
        if not known:
            self._tokens = 0.0
        return before

    def _depth(self, leading: Leading) -> int:
        known, depth = self._tokens_of, 0
        for key in leading.keys:
            if key not in known:
                break
            depth += 1
        return depth
