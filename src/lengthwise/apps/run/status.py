"""How far a run is, told from its ledger alone: by model, whoever runs it, wherever."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lengthwise.apps.ledger.contracts import ENDED, Ledger, State
from lengthwise.apps.run.layout import Layout
from lengthwise.apps.run.owners import ENGINES, alive

SHAPE = "shape"
"""The fact that tells what calls and models the ledger's numbers are."""


@dataclass(frozen=True)
class ModelStatus:
    """One model.

    Attributes:
        name: As the application calls it.
        tasks: By state, in small letters, those of all its calls.
        calls: The same, call by call.
        tokens: Output tokens of the answers that are recorded.
        tries: Attempts that ended, in answers or not.
        engines: What answers for it now: engine, version, address.
    """

    name: str
    tasks: Mapping[str, int]
    calls: Mapping[str, Mapping[str, int]]
    tokens: int
    tries: int
    engines: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """All tasks."""
        return sum(self.tasks.values())

    @property
    def ended(self) -> int:
        """Those that have ended."""
        return sum(self.tasks.get(state.name.lower(), 0) for state in ENDED)


@dataclass
class _Sum:
    calls: dict[str, dict[str, int]] = field(default_factory=dict)
    tasks: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    tries: int = 0

    def add(self, call: str, state: State, tasks: int) -> None:
        name = state.name.lower()
        for counts in (self.tasks, self.calls.setdefault(call, {})):
            counts[name] = counts.get(name, 0) + tasks


def shape_of(layout: Layout) -> str:
    """What a ledger notes of its calls and models."""
    tasks = layout.tasks
    return json.dumps({"calls": tasks.calls, "models": tasks.models, "pairs": layout.pairs})


def engines_of(names: tuple[str, ...], abouts: Mapping[int, set[str]]) -> str:
    """What a coordinator notes of its engines; nothing where it has none."""
    told = {names[model]: sorted(some) for model, some in sorted(abouts.items())}
    return json.dumps(told) if told else ""


def status_of(ledger: Ledger) -> tuple[ModelStatus, ...]:
    """Each model in the application's order; () of a run that an older lengthwise laid out."""
    facts = ledger.facts()
    if SHAPE not in facts:
        return ()
    shape = json.loads(facts[SHAPE])
    sums = [_Sum() for _ in shape["models"]]
    for (pair, state), tasks in ledger.counts().items():
        call, model = shape["pairs"][pair]
        sums[model].add(shape["calls"][call], state, tasks)
    for pair, tries, tokens in ledger.sums():
        one = sums[shape["pairs"][pair][1]]
        one.tries, one.tokens = one.tries + tries, one.tokens + tokens
    engines = _engines(facts, alive(ledger))
    return tuple(
        ModelStatus(name, one.tasks, one.calls, one.tokens, one.tries, tuple(engines.get(name, ())))
        for name, one in zip(shape["models"], sums, strict=True)
    )


def _engines(facts: Mapping[str, str], owners: list[str]) -> dict[str, list[str]]:
    """By model's name, of coordinators that are alive."""
    found: dict[str, list[str]] = {}
    for owner in owners:
        told: Any = json.loads(facts.get(ENGINES + owner) or "{}")
        for name, abouts in told.items():
            found.setdefault(name, []).extend(abouts)
    return found
