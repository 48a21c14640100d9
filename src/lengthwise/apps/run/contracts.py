"""What a run is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from lengthwise.apps.launch.contracts import Ask
from lengthwise.apps.ledger.contracts import Output, State
from lengthwise.apps.run.layout import Floats, Layout
from lengthwise.schema.app import ModelPlan, Placement
from lengthwise.schema.errors import InputError

Plans = tuple[ModelPlan, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a task asks, and the key of its answer."""

    key: str
    ask: Ask


Outputs = Callable[[int], Output | None]
"""The answer of a task that has ended, by the application's number; None of a skipped one."""


class Decider(Protocol):
    """What a task asks, once its parents have ended."""

    def decide(self, task: int, outputs: Outputs) -> Asked | None:
        """The request; None: the task is skipped.

        Raises:
            InputError: There is none that could be sent; the task is dead then.
        """
        ...


@dataclass(frozen=True)
class Guide:
    """What runs when, as planned.

    Attributes:
        stages: Plans of each stage.
        spare: Plans of models that are in no stage.
        ends_s: When each stage is to end, from the start; () where nobody knows.
        slack: How much sooner and later than that is as planned, as shares.
        ready_s: When the first engine is to be ready, from the start.
    """

    stages: tuple[Plans, ...]
    spare: Plans = ()
    ends_s: tuple[float, ...] = ()
    slack: tuple[float, float] = (0.8, 1.25)
    ready_s: float = 0.0


class Rooms(Protocol):
    """Where engines have room."""

    def fits(self, plans: Plans) -> bool:
        """Whether plans have room beside one another."""
        ...

    def place(self, plans: Plans, before: Placement, running: Plans, asleep: Placement) -> Placement:
        """Where their replicas go; ``asleep`` are those of the same plans that could be woken."""
        ...

    def ready_s(self, plan: ModelPlan) -> float:
        """Seconds from its start until a replica is ready, as planned; 0: nobody knows."""
        ...


@dataclass(frozen=True)
class Settings:
    """How patient a run is.

    Attributes:
        max_attempts: After so many a task is dead.
        lease_s: A lease that is not prolonged for so long is given to others.
        backoff_s: Before the second attempt; twice as long before each further one, less or more by chance.
        most_backoff_s: Longest time between attempts.
        save_s: How often answers so far are kept.
        linger_s: How long an answer on which nothing hangs may wait to be recorded with others.
        engine_failures: After so many failures in a row an engine is started anew.
        engine_deaths: After so many ends of a model's engines without an answer between them the run gives up.
        seed: Of what is left to chance.
        replans: So often at most the rest is planned anew; 0: never.
    """

    max_attempts: int = 3
    lease_s: float = 60.0
    backoff_s: float = 1.0
    most_backoff_s: float = 60.0
    save_s: float = 2.0
    linger_s: float = 0.2
    engine_failures: int = 8
    engine_deaths: int = 12
    seed: int = 0
    replans: int = 3

    def __post_init__(self) -> None:
        for name in ("max_attempts", "lease_s", "backoff_s", "save_s", "engine_failures", "engine_deaths"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} must be above 0; it is {getattr(self, name)}")


@dataclass(frozen=True)
class Job:
    """A run.

    Attributes:
        layout: Its tasks as they stand in the ledger.
        expected_tokens: [n] by place.
        decider: What they ask.
        guide: What runs when.
        rooms: Where.
        identity: Tells this application on these inputs from others.
        owner: Tells this coordinator from others, dead ones included.
        settings: How patient it is.
        replan: A new guide for what is left, once reality has left the plan's interval; None: the old one stays.
        seek: Waits for the plan that is still looked for when engines start; None: the guide is of it.
    """

    layout: Layout
    expected_tokens: Floats
    decider: Decider
    guide: Guide
    rooms: Rooms
    identity: str
    owner: str
    settings: Settings = field(default_factory=Settings)
    replan: Replan | None = None
    seek: Callable[[], Guide] | None = None

    def backoff_s(self, place: int, tries: int) -> float:
        """Seconds until the next attempt, the same for the same attempt of the same task."""
        settings = self.settings
        longest = min(settings.most_backoff_s, settings.backoff_s * 2.0 ** (tries - 1))
        return float(longest * np.random.default_rng((settings.seed, place, tries)).uniform(0.5, 1.0))


@dataclass(frozen=True)
class Drifted:
    """Where a run is that may not be where it was planned to be.

    Attributes:
        at_s: Since the start.
        stage: The stage that it is in.
        planned_s: When that stage was to end.
        finished: Models that have nothing left to do.
        done: Tasks that have ended, by model.
        running: What runs.
        is_late: Whether its clock has left the plan's interval; else its lengths are to be looked at.
        ended: (place, state, prompt tokens, output tokens) of tasks that have ended.
        written: Tokens of answers so far, by place.
        placement: Where engines are.
    """

    at_s: float
    stage: int
    planned_s: float
    finished: Sequence[int]
    done: Sequence[int]
    running: Plans
    is_late: bool = True
    ended: Sequence[tuple[int, State, int, int]] = ()
    written: Mapping[int, int] = field(default_factory=dict)
    placement: Placement = field(default_factory=dict)


@dataclass(frozen=True)
class Revised:
    """What comes of looking at a plan anew.

    Attributes:
        guide: To follow from where the run was when it was looked at.
        is_new: Whether it is another plan; else the old one, with the times at which it is to be where by now.
        about: Why, in words.
    """

    guide: Guide
    is_new: bool
    about: str


Replan = Callable[[Drifted], "Guide | Revised | None"]
"""What to follow once reality has left the plan's interval; None: as before."""
