"""Health of workers: health checks, circuit breakers, and ejection of outliers among peers."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from statistics import median

REFUSED, UNHEALTHY, TIMEOUT = "refused", "unhealthy", "timeout"
MAX_TIMEOUTS = 3  # timed-out checks in a row after which a worker is down; any other failed check counts at once


class Health:
    """Result of a worker's health checks.

    The worker is down until a check passes, and up again after any passed check. A check that times out does not count
    if the worker has answered a request since the check before, because a busy engine is healthy. ``detail`` is the
    cause of the last failure, "" after a passed check. ``was_refused`` states whether a check's connection was refused
    since the last passed check, and ``answered_s`` is the time of the worker's last answer to a request.
    """

    def __init__(self) -> None:
        self.up = self.was_refused = False
        self.detail = "not checked yet"
        self._failures = 0
        self._checked_s = self.answered_s = -math.inf

    def passed(self, now_s: float) -> bool:
        """Record a passed check. Return whether the worker was down before."""
        was_up, self.up, self.detail, self._checked_s = self.up, True, "", now_s
        self._failures, self.was_refused = 0, False
        return not was_up

    def failed(self, now_s: float, kind: str, detail: str) -> bool:
        """Record a failed check of kind REFUSED, UNHEALTHY or TIMEOUT. Return whether this takes the worker down."""
        self.detail = detail
        previous_s, self._checked_s = self._checked_s, now_s
        if kind == TIMEOUT and self.answered_s >= previous_s:
            return False
        self.was_refused |= kind == REFUSED
        self._failures += 1
        changed = self.up and (kind != TIMEOUT or self._failures >= MAX_TIMEOUTS)
        self.up &= not changed
        return changed


CLOSED, OPEN, HALF_OPEN = "closed", "open", "half-open"
MAX_DOUBLINGS = 4
OWNER_S = 30.0  # an owner's requests may fail by their own fault, so the errors of each owner count once per period
_MAX_OWNERS = 1024


class Breaker:
    """Circuit breaker over the requests of a worker, which gets no requests while the circuit is open.

    A closed circuit opens after ``failures`` failures in a row. After ``open_s`` an open circuit is half-open: the
    worker gets one trial request. The first output of the trial closes the circuit. Each opening lasts twice as long as
    the one before, up to 16 times ``open_s``, until a complete response resets this. Methods that record an event
    return whether the state has changed.
    """

    def __init__(self, failures: int, open_s: float) -> None:
        self._max_failures, self._open_s = failures, open_s
        self._failures = self._openings = 0
        self._until_s = self._owners_s = -math.inf
        self._opened = False
        self._owners: set[Hashable] = set()

    def state(self, now_s: float) -> str:
        """Return CLOSED, OPEN or HALF_OPEN."""
        return CLOSED if not self._opened else OPEN if now_s < self._until_s else HALF_OPEN

    def next_s(self, now_s: float) -> float:
        """Return when the circuit becomes half-open, or inf if it is not open."""
        return self._until_s if self.state(now_s) == OPEN else math.inf

    def failed(self, now_s: float) -> bool:
        """Record a failed request. An open circuit ignores it, because it started before the circuit opened."""
        state = self.state(now_s)
        if state == OPEN:
            return False
        self._failures += 1
        if state == CLOSED and self._failures < self._max_failures:
            return False
        self._opened = True
        self._until_s = now_s + self._open_s * 2 ** min(self._openings, MAX_DOUBLINGS)
        self._openings += 1
        return True

    def count_owner(self, owner: Hashable, now_s: float) -> bool:
        """Return whether a failure of this owner counts: once per period, and for at most 1024 owners."""
        if now_s - self._owners_s >= OWNER_S:
            self._owners.clear()
            self._owners_s = now_s
        if owner in self._owners or len(self._owners) >= _MAX_OWNERS:
            return False
        self._owners.add(owner)
        return True

    def started(self, now_s: float) -> bool:
        """Record the first output of a request, which closes a half-open circuit."""
        if self.state(now_s) != HALF_OPEN:
            return False
        self._opened, self._failures = False, 0
        return True

    def succeeded(self, now_s: float) -> bool:
        """Record a complete response, which closes a half-open circuit and resets the failures."""
        if self.state(now_s) == OPEN:
            return False
        changed = self._opened
        self.reset()
        return changed

    def reset(self) -> None:
        """Close the circuit and forget all failures."""
        self._failures = self._openings = 0
        self._opened = False


WINDOW_S = 30.0
MIN_REQUESTS = 10  # requests of a worker, and of its peers, from which on they are compared
ERROR_SHARE, ERROR_FACTOR = 0.3, 3.0
MIN_CONFIRMED = 3  # rejected requests that a peer then served, from which on a worker may be ejected for them
SLOW_FACTOR, SLOW_S = 5.0, 1.0
_MAX_SAMPLES = 64
_FORGET_FACTOR = 10.0  # times the length of a worker's last ejection, after which its next one is the shortest again


@dataclass
class _ModelCounts:
    succeeded: int = 0
    rejected: int = 0
    confirmed: int = 0
    sessions: set[str] = field(default_factory=set)


@dataclass
class _Counts:
    succeeded: int = 0
    failed: int = 0
    models: defaultdict[str, _ModelCounts] = field(default_factory=lambda: defaultdict(_ModelCounts))
    first_token_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_SAMPLES))

    def errors(self) -> int:
        return self.failed + sum(model.rejected for model in self.models.values())


@dataclass
class _Ejection:
    until_s: float = -math.inf
    length_s: float = 0.0


class OutlierDetector:
    """Ejects workers that are far worse than their peers in failures, time to first token, or rejected requests (4xx).

    Any worker may get invalid requests, so a high share of 4xx only makes a worker suspect. A peer then gets the same
    request. If the peer serves it, the rejection counts against the suspect. If the peer rejects it too, the suspicion
    ends. The first ejection lasts ``open_s``, each further one twice as long, up to 16 times ``open_s``.
    """

    def __init__(self, open_s: float) -> None:
        self._open_s = open_s
        self._counts: defaultdict[str, _Counts] = defaultdict(_Counts)
        self._ejections: dict[str, _Ejection] = {}
        self._window_start_s = -math.inf

    def succeeded(self, name: str, model: str = "") -> None:
        """Record a complete response."""
        self._counts[name].succeeded += 1
        self._counts[name].models[model].succeeded += 1

    def rejected(self, name: str, model: str, session: str = "") -> None:
        """Record a request that the worker rejected with 4xx. The requests of a session count once per model."""
        counts = self._counts[name].models[model]
        if session not in counts.sessions:
            counts.rejected += 1
            counts.sessions |= {session} - {""}

    def is_suspect(self, name: str, model: str) -> bool:
        """Return whether the worker rejects a far larger share of the model's requests than its peers do."""
        return _rejects_more(name, model, self._counts)

    def record_rejection_check(self, name: str, model: str, *, wrong: bool) -> None:
        """Record whether the worker was wrong to reject a request, because a peer served the request."""
        counts = self._counts[name].models[model]
        if wrong:
            counts.rejected += 1
            counts.confirmed += 1
        else:
            counts.rejected = 0

    def failed(self, name: str) -> None:
        """Record a failed request."""
        self._counts[name].failed += 1

    def first_token(self, name: str, seconds: float) -> None:
        """Record a time to first token."""
        self._counts[name].first_token_s.append(seconds)

    def discard(self, name: str) -> None:
        """Discard the counts of a worker, because its name becomes free."""
        self._counts.pop(name, None)
        self._ejections.pop(name, None)

    def is_ejected(self, name: str, now_s: float) -> bool:
        """Return whether the worker is ejected."""
        return name in self._ejections and now_s < self._ejections[name].until_s

    def next_s(self, now_s: float) -> float:
        """Return when the first ejection ends, or inf if there is none."""
        return min((one.until_s for one in self._ejections.values() if one.until_s > now_s), default=math.inf)

    def update(self, now_s: float, names: Collection[str]) -> tuple[str, ...]:
        """Eject outliers, up to half of the healthy workers ``names``. Return the workers ejected or readmitted."""
        self._counts = defaultdict(_Counts, {name: one for name, one in self._counts.items() if name in names})
        self._ejections = {name: one for name, one in self._ejections.items() if name in names}
        ejected = sorted(
            (name for name in self._ejections if self.is_ejected(name, now_s)),
            key=lambda name: self._ejections[name].until_s,
        )
        max_ejected = len(names) // 2
        # If other workers have left, more than half would be ejected: those that are due first return early.
        returned = ejected[: max(0, len(ejected) - max_ejected)]
        for name in returned:
            self._ejections[name].until_s = now_s
        counts = {name: self._counts[name] for name in names if name in self._counts}
        outliers = [name for name in counts if not self.is_ejected(name, now_s) and _is_outlier(name, counts)]
        outliers.sort(key=lambda name: -counts[name].errors())
        del outliers[max_ejected - (len(ejected) - len(returned)) :]
        for name in outliers:
            ejection = self._ejections.setdefault(name, _Ejection())
            recent = now_s - ejection.until_s < _FORGET_FACTOR * ejection.length_s
            ejection.length_s = min(2 * ejection.length_s, 16 * self._open_s) if recent else self._open_s
            ejection.until_s = now_s + ejection.length_s
            del self._counts[name]
        if now_s - self._window_start_s >= WINDOW_S:
            self._counts.clear()
            self._window_start_s = now_s
        return (*returned, *outliers)


def _is_outlier(name: str, counts: dict[str, _Counts]) -> bool:
    own, peers = counts[name], [one for peer, one in counts.items() if peer != name]
    failed, total = sum(peer.failed for peer in peers), sum(peer.succeeded + peer.failed for peer in peers)
    if total >= MIN_REQUESTS and _exceeds(own.failed, own.succeeded + own.failed, failed, total):
        return True
    confirmed = [model for model, served in own.models.items() if served.confirmed >= MIN_CONFIRMED]
    if any(_rejects_more(name, model, counts) for model in confirmed):
        return True
    medians = [median(peer.first_token_s) for peer in peers if len(peer.first_token_s) >= MIN_REQUESTS]
    if len(own.first_token_s) < MIN_REQUESTS or not medians:
        return False
    typical_s = median(medians)
    return median(own.first_token_s) > max(SLOW_FACTOR * typical_s, typical_s + SLOW_S)


def _rejects_more(name: str, model: str, counts: dict[str, _Counts]) -> bool:
    if name not in counts or model not in counts[name].models:
        return False
    own = counts[name].models[model]
    peers = [one.models[model] for peer, one in counts.items() if peer != name and model in one.models]
    rejected, succeeded = sum(one.rejected for one in peers), sum(one.succeeded for one in peers)
    return _exceeds(own.rejected, own.rejected + own.succeeded, rejected, rejected + succeeded)


def _exceeds(bad: int, total: int, peer_bad: int, peer_total: int) -> bool:
    if total < MIN_REQUESTS or bad < ERROR_SHARE * total:
        return False
    return peer_total < MIN_REQUESTS or bad / total >= ERROR_FACTOR * peer_bad / peer_total
