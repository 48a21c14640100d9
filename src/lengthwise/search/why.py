"""Why the winner wins, and why others are out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lengthwise.schema.plan import Choice, Region, Standing
from lengthwise.search.objectives import Question
from lengthwise.search.space import Axes

FEW = 4


def advantages(choices: Sequence[Choice], axes: Axes, question: Question) -> tuple[str, ...]:
    """For each axis, the best configuration that has another value there: what the winner's value is worth."""
    best = choices[0] if choices and choices[0].standing is Standing.RANKED else None
    if best is None:
        return ()
    told = []
    for key in axes:
        others = [c for c in choices if _known(c) and c.settings.get(key) != best.settings.get(key)]
        others = [c for c in others if key in c.settings and key in best.settings]
        if others:
            told.append(_sentence(key, best, others[0], question))
    return tuple(told)


def regions(choices: Sequence[Choice]) -> tuple[Region, ...]:
    """Rejected and pruned choices that failed alike, the largest first."""
    groups: dict[str, list[Choice]] = {}
    for choice in choices:
        if choice.region:
            groups.setdefault(choice.region, []).append(choice)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    return tuple(
        Region(name, len(group), group[0].reason, _shared(group, choices)) for name, group in ordered
    )


def _known(choice: Choice) -> bool:
    return choice.standing in (Standing.RANKED, Standing.SCOUTED)


def _sentence(key: str, best: Choice, other: Choice, question: Question) -> str:
    short = key.rpartition(".")[2]
    head = f"{short} = {best.settings[key]}: the best with another, {other.name}, "
    rough = " (scouted)" if other.standing is Standing.SCOUTED else ""
    sign = 1 if question.objective.higher_is_better else -1
    off = sign * (best.objective.value - other.objective.value)
    if off <= _half(best) + _half(other):
        return f"{head}cannot be told apart{rough}."
    ratio = other.objective.value / best.objective.value
    more = "less" if ratio < 1 else "more"
    return f"{head}has {abs(ratio - 1):.0%} {more} {question.objective.label}{rough}."


def _half(choice: Choice) -> float:
    half = choice.objective.half_width
    return half if half == half else 0.0  # noqa: PLR0124 - NaN: it is not known


def _shared(group: Sequence[Choice], choices: Sequence[Choice]) -> dict[str, tuple[Any, ...]]:
    """Settings whose values in the group are few, and fewer than among all."""
    shared: dict[str, tuple[Any, ...]] = {}
    for key in dict.fromkeys(k for c in group for k in c.settings):
        own = list(dict.fromkeys(c.settings[key] for c in group if key in c.settings))
        whole = {c.settings[key] for c in choices if key in c.settings}
        if len(own) < len(whole) and len(own) <= FEW:
            shared[key] = tuple(own)
    return shared
