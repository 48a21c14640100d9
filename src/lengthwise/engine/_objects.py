"""What the reference moves about: a request, a step, a replica."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lengthwise.schema.errors import InternalError

if TYPE_CHECKING:
    from lengthwise.engine._cost_reading import CostReader
    from lengthwise.engine._meter import Meter
    from lengthwise.engine._setup import Setup


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
    home: Replica | None = None
    held: int = 0
    arrives_s: float = math.inf

    @property
    def context(self) -> int:
        """Tokens that must be in the cache before the next one can come."""
        return self.prompt + self.generated

    @property
    def home_replica(self) -> Replica:
        """Where it was prefilled, if it decodes elsewhere: there ``held`` blocks wait to be fetched."""
        if self.home is None:
            raise InternalError(f"request {self.index} was handed over by nobody")
        return self.home


@dataclass(eq=False)
class Step:
    start_s: float
    end_s: float = 0.0
    decodes: list[Request] = field(default_factory=list)
    prompts: list[tuple[Request, int]] = field(default_factory=list)
    resting: list[Request] = field(default_factory=list)
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
    s: Setup
    number: int
    free: int
    line: Queue
    meter: Meter
    cost: CostReader
    idle: list[Request] = field(default_factory=list)
    flights: list[Step] = field(default_factory=list)
    freed: int = 0
    tokens: int = 0
    touched: bool = False
    decide: bool = False
    undecided: int = 0
    steps_since: int = 0
    ended_since: int = 0
    phase_steps: int = 0
    phase_rounds: int = 0
    since: list[Step] = field(default_factory=list)
    """The last step of the micro-batch whose turns are the rounds, and those that began after it."""
    coming: list[Request] = field(default_factory=list)
    sends_until_s: float = 0.0
    receives_until_s: float = 0.0

    @property
    def queue(self) -> list[Request]:
        """Who waits for this replica, or over a central queue for any."""
        return self.line.waiting

    @property
    def resident(self) -> list[Request]:
        """Every request that holds memory and a seat here, those on their way here too."""
        flying = [q for s in self.flights for q in (*s.decodes, *s.resting, *(p for p, _ in s.prompts))]
        return self.idle + flying + self.coming
