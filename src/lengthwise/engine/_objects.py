"""What the reference moves about: a request, a step, a replica."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lengthwise.engine._meter import Meter


@dataclass(eq=False)
class Request:
    index: int
    arrival_s: float
    prompt: int
    output: int
    priority: int
    tenant: int
    generated: int = 0
    prefilled: int = 0
    blocks: int = 0
    admission: int = -1
    eviction: int = 0
    seat: int = 0
    last_token_s: float | None = None
    decoding: bool = False
    swapped: bool = False
    waiting: bool = True
    queued_s: float = 0.0
    waited_s: float = 0.0
    charged: float = 0.0
    batch: int = 0
    entered: int = 0
    kept: int = 0
    kept_mark: int = 0
    kept_on: int = -1
    key: float = 0.0

    @property
    def context(self) -> int:
        """Tokens that must be in the cache before the next one can come."""
        return self.prompt + self.generated


@dataclass(eq=False)
class Step:
    start_s: float
    end_s: float = 0.0
    decodes: list[Request] = field(default_factory=list)
    prompts: list[tuple[Request, int]] = field(default_factory=list)
    swap_s: float = 0.0
    evicted: bool = False
    flags: int = 0

    @property
    def seqs(self) -> int:
        return len(self.decodes) + len(self.prompts)

    @property
    def prompt_tokens(self) -> int:
        return sum(chunk for _, chunk in self.prompts)


@dataclass(eq=False)
class Queue:
    """Who waits, and the bins in which arrivals gather first; ``overdue_s``: when the next has waited too long."""

    waiting: list[Request]
    bins: list[list[Request]]
    overdue_s: float = math.inf

    @property
    def length(self) -> int:
        """Everybody who is not yet admitted."""
        return len(self.waiting) + sum(map(len, self.bins))


@dataclass(eq=False)
class Replica:
    number: int
    free: int
    line: Queue
    meter: Meter
    idle: list[Request] = field(default_factory=list)
    flights: list[Step] = field(default_factory=list)
    freed: int = 0
    tokens: int = 0
    touched: bool = False
    decide: bool = False
    undecided: int = 0
    steps_since: int = 0
    ended_since: int = 0

    @property
    def queue(self) -> list[Request]:
        """Who waits for this replica, or over a central queue for any."""
        return self.line.waiting

    @property
    def resident(self) -> list[Request]:
        """Every request that holds memory here."""
        flying = [q for s in self.flights for q in (*s.decodes, *(p for p, _ in s.prompts))]
        return self.idle + flying
