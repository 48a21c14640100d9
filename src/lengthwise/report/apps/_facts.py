"""What a page of an application says beside its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class AppFacts:
    """What was planned, on what; and what became of it.

    Attributes:
        name: Of the application.
        facts: What is fixed, in a few words each: rows, tasks, models, nodes.
        gpus: A name for each GPU, in their order; () where engines were given.
        is_mixed: Whether they are of several kinds.
        manifest: Of a run, as its folder holds it; None: it was only planned.
        tokens: Output tokens that were recorded, by model's name.
        answers: Answers that were recorded, by model's name.
    """

    name: str
    facts: Sequence[str] = ()
    gpus: Sequence[str] = ()
    is_mixed: bool = False
    manifest: Mapping[str, Any] | None = None
    tokens: Mapping[str, int] = field(default_factory=dict)
    answers: Mapping[str, int] = field(default_factory=dict)
