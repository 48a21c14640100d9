"""Whether an engine is there, by its health checks alone."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from statistics import median

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

    def succeeded(self, now_s: float) -> None:
        """A request was answered."""
        self._answered_s = now_s


CLOSED, OPEN, HALF_OPEN = "closed", "open", "half-open"
MOST_DOUBLINGS = 4
CALLER_S = 30.0
"""What fails a caller's requests again and again may be in them: in so long each caller counts once."""
_CALLERS = 1024
"""So many are remembered; of more the failures do not count."""


class Breaker:
    """Closed, open or half-open; told of every request that an engine answered or failed.

    Closed, so many failures in a row open it, with no answer to its end between them. It is open for
    ``open_s``, then half-open: one request is a trial. When its output begins, it closes; failed, it opens for
    twice as long, up to 16 times ``open_s``.

    Args:
        failures: In a row, that open it.
        open_s: How long it stays open the first time.
    """

    def __init__(self, failures: int, open_s: float) -> None:
        self._most, self._open_s = failures, open_s
        self._failures = self._times = 0
        self._until_s = -math.inf
        self._tripped = False
        self._callers: set[Hashable] = set()
        self._callers_s = -math.inf

    def state(self, now_s: float) -> str:
        """One of CLOSED, OPEN, HALF_OPEN."""
        if not self._tripped:
            return CLOSED
        return OPEN if now_s < self._until_s else HALF_OPEN

    def next_s(self, now_s: float) -> float:
        """When it becomes half-open; inf where it is not open."""
        return self._until_s if self.state(now_s) == OPEN else math.inf

    def failed(self, now_s: float) -> bool:
        """A request failed there; whether the state changed. What fails while it is open was sent before."""
        state = self.state(now_s)
        if state == OPEN:
            return False
        self._failures += 1
        if state == CLOSED and self._failures < self._most:
            return False
        self._tripped = True
        self._until_s = now_s + self._open_s * 2 ** min(self._times, MOST_DOUBLINGS)
        self._times += 1
        return True

    def is_new(self, caller: Hashable, now_s: float) -> bool:
        """Whether no failure of the caller's has been counted lately; it counts as one from now on."""
        if now_s - self._callers_s >= CALLER_S:
            self._callers.clear()
            self._callers_s = now_s
        if caller in self._callers or len(self._callers) >= _CALLERS:
            return False
        self._callers.add(caller)
        return True

    def started(self, now_s: float) -> bool:
        """The output of a request began there; whether the state changed. A trial need not come to its end."""
        if self.state(now_s) != HALF_OPEN:
            return False
        self._tripped = False
        self._failures = 0
        return True

    def succeeded(self, now_s: float) -> bool:
        """A request was answered to its end there; whether the state changed."""
        if self.state(now_s) == OPEN:
            return False
        changed = self._tripped
        self.reset()
        return changed

    def reset(self) -> None:
        """Closed, nothing remembered: it is another engine now."""
        self._failures = self._times = 0
        self._tripped = False


WINDOW_S = 30.0
LEAST = 10
"""Requests below which nothing is said of a worker."""
ERROR_SHARE, ERROR_TIMES = 0.3, 3.0
PROOFS = 3
"""Requests that a worker called wrong and a peer then served, before it is left out for that."""
SLOW_TIMES, SLOW_S = 5.0, 1.0
_KEPT = 64
_FORGET = 10.0
"""Who was not left out for so many times its last absence begins again with the shortest."""


@dataclass
class _Said:
    """Of one worker to requests for one model, in one window."""

    succeeded: int = 0
    rejected: int = 0
    proven: int = 0
    sessions: set[str] = field(default_factory=set)

    @property
    def all(self) -> int:
        return self.succeeded + self.rejected


@dataclass
class _Tally:
    """Of one worker, in one window."""

    succeeded: int = 0
    failed: int = 0
    message: dict[str, _Said] = field(default_factory=dict)
    first_token_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))

    @property
    def all(self) -> int:
        return self.succeeded + self.failed

    def of(self, model: str) -> _Said:
        return self.message.setdefault(model, _Said())

    @property
    def no(self) -> int:
        """How often it said no, in one way or the other."""
        return self.failed + sum(one.rejected for one in self.message.values())


@dataclass
class _Out:
    until_s: float = -math.inf
    length_s: float = 0.0


class Outliers:
    """Compares workers by failures, by the time to the first token, and by how often they call requests wrong.

    Requests that are wrong come to all engines of their model, though not alike: the same few clients send them,
    to whoever has room. So a share of 4xx above the others' makes an engine suspect, and no more: then a peer is
    asked the same, and only what a peer served counts against it. Where the peer agrees, the suspicion ends.

    Args:
        open_s: How long a worker is left out the first time; doubled each time, up to 16 times.
    """

    def __init__(self, open_s: float) -> None:
        self._open_s = open_s
        self._tallies: dict[str, _Tally] = {}
        self._out: dict[str, _Out] = {}
        self._since_s = -math.inf

    def succeeded(self, name: str, model: str = "") -> None:
        """A request was answered."""
        tally = self._tally(name)
        tally.succeeded += 1
        tally.of(model).succeeded += 1

    def rejected(self, name: str, model: str, session: str = "") -> None:
        """A request was called wrong (4xx)."""
        said = self._tally(name).of(model)
        if session not in said.sessions:
            said.rejected += 1
            said.sessions |= {session} - {""}

    def suspects(self, name: str, model: str) -> bool:
        """Whether it calls far more of a model's requests wrong than the others that serve it."""
        return _far_from_peers(name, model, self._tallies)

    def record_outcome(self, name: str, model: str, *, wrong: bool) -> None:
        """What it called wrong was sent to a peer: it was wrong to do so, or right."""
        said = self._tally(name).of(model)
        if wrong:
            said.rejected += 1
            said.proven += 1
        else:
            said.rejected = 0

    def failed(self, name: str) -> None:
        """A request failed."""
        self._tally(name).failed += 1

    def first_token(self, name: str, seconds: float) -> None:
        """A first token came after so long."""
        self._tally(name).first_token_s.append(seconds)

    def discard(self, name: str) -> None:
        """The worker of this name is another one from now on."""
        self._tallies.pop(name, None)
        self._out.pop(name, None)

    def out(self, name: str, now_s: float) -> bool:
        """Whether it is left out."""
        out = self._out.get(name)
        return out is not None and now_s < out.until_s

    def next_s(self, now_s: float) -> float:
        """When the first of those that are left out comes back; inf none is."""
        return min((out.until_s for out in self._out.values() if out.until_s > now_s), default=math.inf)

    def poll(self, now_s: float, names: Collection[str]) -> tuple[str, ...]:
        """Leaves out who is far off, of all that are well; returns for whom something changed."""
        self._discard(names)
        back = self._called_back(now_s, len(names) // 2)
        left = len(names) // 2 - len(self._absent(now_s))
        there = {name: self._tallies[name] for name in names if name in self._tallies}
        bad = sorted(
            (name for name in there if not self.out(name, now_s) and _far_off(name, there)),
            key=lambda name: -there[name].no,
        )[:left]
        for name in bad:
            self._leave_out(name, now_s)
        if now_s - self._since_s >= WINDOW_S:
            self._tallies.clear()
            self._since_s = now_s
        return (*back, *bad)

    def _absent(self, now_s: float) -> list[str]:
        """Who is left out, the one that comes back first before the others."""
        absent = [name for name in self._out if self.out(name, now_s)]
        return sorted(absent, key=lambda name: self._out[name].until_s)

    def _called_back(self, now_s: float, most: int) -> list[str]:
        """Who comes back early, because others went and more than half would be absent."""
        absent = self._absent(now_s)
        back = absent[: max(0, len(absent) - most)]
        for name in back:
            self._out[name].until_s = now_s
        return back

    def _leave_out(self, name: str, now_s: float) -> None:
        out = self._out.setdefault(name, _Out())
        again = now_s - out.until_s < _FORGET * out.length_s
        out.length_s = min(2 * out.length_s, 16 * self._open_s) if again else self._open_s
        out.until_s = now_s + out.length_s
        self._tallies.pop(name, None)

    def _tally(self, name: str) -> _Tally:
        tally = self._tallies.get(name)
        if tally is None:
            tally = self._tallies[name] = _Tally()
        return tally

    def _discard(self, names: Collection[str]) -> None:
        self._tallies = {name: tally for name, tally in self._tallies.items() if name in names}
        self._out = {name: out for name, out in self._out.items() if name in names}


def _far_off(name: str, active: dict[str, _Tally]) -> bool:
    mine = active[name]
    others = [tally for one, tally in active.items() if one != name]
    return _fails(mine, others) or _rejects(name, active) or _is_slow(mine, others)


def _fails(own: _Tally, others: list[_Tally]) -> bool:
    theirs, of_theirs = sum(t.failed for t in others), sum(t.all for t in others)
    return of_theirs >= LEAST and _more(own.failed, own.all, theirs, of_theirs)


def _rejects(name: str, active: dict[str, _Tally]) -> bool:
    """Whether peers served what it calls wrong, again and again."""
    said = active[name].message
    return any(said[model].proven >= PROOFS and _far_from_peers(name, model, active) for model in said)


def _far_from_peers(name: str, model: str, active: dict[str, _Tally]) -> bool:
    if name not in active or model not in active[name].message:
        return False
    mine = active[name].message[model]
    theirs = [tally.message[model] for one, tally in active.items() if one != name and model in tally.message]
    return _more(mine.rejected, mine.all, sum(t.rejected for t in theirs), sum(t.all for t in theirs))


def _more(own: int, of_mine: int, other: int, of_theirs: int) -> bool:
    """Whether a share is far above the others'; of few requests at others nothing is known."""
    if of_mine < LEAST or own < ERROR_SHARE * of_mine:
        return False
    return of_theirs < LEAST or own / of_mine >= ERROR_TIMES * other / of_theirs


def _is_slow(own: _Tally, others: list[_Tally]) -> bool:
    medians = [median(tally.first_token_s) for tally in others if len(tally.first_token_s) >= LEAST]
    if len(own.first_token_s) < LEAST or not medians:
        return False
    usual = median(medians)
    return median(own.first_token_s) > max(SLOW_TIMES * usual, usual + SLOW_S)
