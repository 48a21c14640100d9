"""What became of a run, beside its plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lengthwise.report._numbers import UNKNOWN
from lengthwise.report.apps._facts import AppFacts
from lengthwise.report.apps._ran import happened, spells_of, worked_s
from lengthwise.report.apps._words import took, took_about
from lengthwise.schema.app import AppPlan

MODEL_HEADS = ("model", "answers", "output tokens", "tokens/s while it ran", "planned to run", "ran")
_ENDED = ("done", "skipped", "dead", "blocked")


def outcome(plan: AppPlan | None, models: Sequence[str], about: AppFacts) -> list[str]:
    """How a run ended, a sentence each; nothing where there was none."""
    facts = about.manifest
    if facts is None:
        return []
    return [
        *_ended(facts),
        *_beside(plan, facts),
        *_troubles(facts),
        *_unheard(facts),
        *_resumed(facts, models, about),
    ]


def _ended(facts: Mapping[str, Any]) -> Iterator[str]:
    states = facts["counts"].get("all", {})
    told = ", ".join(f"{states[name]:,} {name}" for name in _ENDED if states.get(name))
    left = sum(count for name, count in states.items() if name not in _ENDED)
    how = {
        "done": "The run is over",
        "stopped": "The run was stopped",
        "cancelled": "The run was cancelled",
        "failed": "Engines of the run failed",
    }
    rest = f", {left:,} not yet" if left else ""
    yield f"{how.get(facts['how'], facts['how'])} after {took(facts['seconds'])}: {told or 'nothing'}{rest}."


def _beside(plan: AppPlan | None, facts: Mapping[str, Any]) -> Iterator[str]:
    if plan is None:
        return
    told = f"Planned were {took_about(plan.makespan)}"
    low, high = plan.quantiles_s.get(0.05), plan.quantiles_s.get(0.95)
    if low is not None and high is not None:
        told += f" (nine draws of ten: {took(low)} to {took(high)})"
    if facts["how"] != "done" or facts["resumed"] or not plan.makespan.value > 0:
        yield f"{told}, for the whole of it at one go."
        return
    change = facts["seconds"] / plan.makespan.value - 1.0
    apart = f"{abs(change):.0%} {'longer' if change > 0 else 'shorter'}".replace("%", " %")
    yield f"{told}; it took {'as long' if abs(change) < 0.005 else apart}."


def _troubles(facts: Mapping[str, Any]) -> Iterator[str]:
    counts = happened(facts)
    if died := counts.get("died"):
        yield f"Engines died {died} time{'s' if died > 1 else ''}; what they worked on was asked again."
    if replanned := counts.get("replan"):
        yield f"The plan was made anew {replanned} time{'s' if replanned > 1 else ''}, as the run had left it."


def _unheard(facts: Mapping[str, Any]) -> Iterator[str]:
    for one in facts.get("silent", ()):
        yield f"At its end {one['words']}, since {took(one['since_s'])} of the run."


def _resumed(facts: Mapping[str, Any], models: Sequence[str], about: AppFacts) -> Iterator[str]:
    if facts["resumed"]:
        yield "It went on with a run that was stopped before; charts and seconds are of the last part alone."
    if silent := [name for name in models if not about.answers.get(name)]:
        yield f"Without an answer: {', '.join(silent)}."


def model_cells(plan: AppPlan | None, model: int, name: str, about: AppFacts) -> list[str]:
    """A model as cells under ``MODEL_HEADS``."""
    assert about.manifest is not None
    spans = [s for s in plan.spans if s.model == model and s.what == "run"] if plan is not None else []
    planned = (
        f"{took(min(s.start_s for s in spans))} to {took(max(s.end_s for s in spans))}" if spans else UNKNOWN
    )
    spells = spells_of(about.manifest)
    ran = worked_s(spells).get(name)
    tokens = about.tokens.get(name, 0)
    ran_s = union_s([(s.start_s, s.end_s) for s in spells if s.model == name and s.what == "run"])
    is_whole = ran_s > 0 and not about.manifest["resumed"]
    return [
        name,
        f"{about.answers.get(name, 0):,}",
        f"{tokens:,}",
        f"{tokens / ran_s:,.0f}" if is_whole else UNKNOWN,
        planned,
        f"{took(ran[0])} to {took(ran[1])}" if ran else UNKNOWN,
    ]


def union_s(spells: Sequence[tuple[float, float]]) -> float:
    """Seconds that are in any of these spans."""
    total, until_s = 0.0, 0.0
    for start_s, end_s in sorted(spells):
        total += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    return total
