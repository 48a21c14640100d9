"""Whether an engine is there, by its health checks alone."""

from __future__ import annotations

REFUSED, UNWELL, SILENT = "refused", "unwell", "silent"
MISSES = 3
"""Checks in a row without an answer, after which an engine is down; a clear no counts at once."""


class Health:
    """Down until the first good check; one good check brings it back.

    A check that is only slow (SILENT) does not count while requests are being answered: a busy engine is well.

    Attributes:
        up: Whether it is well.
        detail: What the last check said, "" where it was good.
        was_refused: Whether nobody listened there since it was last well.
    """

    def __init__(self) -> None:
        self.up = False
        self.detail = "not asked yet"
        self.was_refused = False
        self._misses = 0
        self._checked_s = self._answered_s = float("-inf")

    def good(self, now_s: float) -> bool:
        """A check was good; whether it was down before."""
        changed = not self.up
        self.up, self.detail, self._misses, self.was_refused = True, "", 0, False
        self._checked_s = now_s
        return changed

    def bad(self, now_s: float, kind: str, detail: str) -> bool:
        """A check was REFUSED, UNWELL or SILENT; whether it was up before."""
        self.detail = detail
        since_s, self._checked_s = self._checked_s, now_s
        if kind == SILENT and self._answered_s >= since_s:
            return False
        self.was_refused |= kind == REFUSED
        self._misses += 1
        changed = self.up and (kind != SILENT or self._misses >= MISSES)
        if changed:
            self.up = False
        return changed

    def answered(self, now_s: float) -> None:
        """A request was answered."""
        self._answered_s = now_s
