"""What the pages on schedules are written with: models and tasks, numbers, tables, what stands behind a figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Rows = Mapping[str, Mapping[str, Any]]
NOT_YET = "Not measured yet."

MODELS = (
    ("t5-11b-a40", "T5 11B, 8 x A40"),
    ("opt-13b-a40", "OPT 13B, 4 x A40"),
    ("gpt-3-39b-a40", "GPT-3 39B, 16 x A40"),
    ("gpt-3-101b-a100", "GPT-3 101B, 16 x A100"),
    ("gpt-3-175b-a40", "GPT-3 175B, 32 x A40"),
    ("gpt-3-175b-a100", "GPT-3 175B, 16 x A100"),
    ("gpt-3-341b-a40", "GPT-3 341B, 48 x A40"),
)

TASKS = {"s": "S", "t": "T", "g": "G", "c1": "C1", "c2": "C2"}

BOUNDS = ("10 %", "30 %", "70 %", "none")

WINNERS = {"rra": "RRA", "waa-c": "WAA-C", "waa-m": "WAA-M", None: "nothing"}


def number(of: float | None) -> str:
    """Three digits; a dash where there is none."""
    if of is None:
        return "-"
    return f"{of:,.0f}" if abs(of) >= 1000 else f"{of:.3g}"


def percent(of: float | None) -> str:
    """A share in percent."""
    return "-" if of is None else f"{number(100 * of)} %"


def signed(of: float) -> str:
    """An error in percent, with its sign."""
    return f"{'+' if of > 0 else ''}{percent(of)}"


def between(some: Sequence[float], shown: Callable[[float], str]) -> str:
    """The least to the largest; one of them where both are shown alike."""
    low, high = shown(min(some)), shown(max(some))
    return low if low == high else f"{low} to {high}"


def holds(true: bool, words: str) -> None:
    """Nothing, if the numbers still bear a sentence of the page.

    Raises:
        ValueError: They do not; the sentence must go or change.
    """
    if not true:
        raise ValueError(f"the page says that {words}; its numbers do not say so any more: change the words")


def with_ends(value: float, ends: Sequence[float] | None) -> str:
    """A value with its interval."""
    return number(value) + (f" [{number(ends[0])}, {number(ends[1])}]" if ends else "")


def details(rows: Rows, name: str) -> Mapping[str, Any]:
    """What stands behind a figure; empty where it was not measured."""
    return (rows.get(name) or {}).get("details") or {}


def under(rows: Rows, prefix: str) -> dict[str, Mapping[str, Any]]:
    """Details of all figures with a prefix, by the rest of their names."""
    found = {name.removeprefix(prefix): row for name, row in rows.items() if name.startswith(prefix)}
    return {name: {"value": row["value"]} | (row.get("details") or {}) for name, row in found.items()}


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table, or that there is nothing to show."""
    if not lines:
        yield NOT_YET
        return
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    yield from (f"| {' | '.join(line)} |" for line in lines)
