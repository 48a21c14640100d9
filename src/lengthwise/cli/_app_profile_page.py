"""What ``lengthwise app profile`` prints: switches, lengths and costs, with their intervals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import typer

from lengthwise.cli._show import console, print_table
from lengthwise.scenario.app_profiles import Costed, Lengths, Profiled, Switched, mean_of

_SWITCHES = ("model", "replica", "times", "start s", "sleep s", "wake s", "stop s")
_LENGTHS = ("model", "rows", "outputs", "mean tokens", "cut at their limit")
_COSTS = ("model", "replica", "requests", "off before", "off now")


def show(found: Profiled) -> None:
    """Prints what a profile holds."""
    out = console()
    book = found.book
    parts: Sequence[tuple[str, Sequence[str], list[list[str]]]] = (
        ("seconds of switching, means with 95 % intervals:", _SWITCHES, [_switch(one) for one in book.switches]),
        ("output lengths of the sample, means with 95 % intervals:", _LENGTHS, [_length(one) for one in book.lengths]),
        ("calibrated costs, by how much single held-out requests are off:", _COSTS, [_cost(one) for one in book.costs]),
    )  # fmt: skip
    for title, columns, rows in parts:
        if rows:
            out.print(title, style="bold")
            print_table(columns, rows, wraps=())
            out.print()
    for note in (*found.notes, *_advice(found)):
        out.print(f"note: {note}", highlight=False)


def tell(found: Profiled, application: str) -> None:
    """Says where it is, and who uses it."""
    typer.echo(f"wrote {found.folder}", err=True)
    typer.echo(f"use it: lengthwise app plan {application} --profile {found.folder}", err=True)


def _switch(row: Switched) -> list[str]:
    seconds = (_mean(values) for values in (row.start_s, row.sleep_s, row.wake_s, row.stop_s))
    return [row.model, _replica(row), str(len(row.start_s)), *seconds]


def _length(row: Lengths) -> list[str]:
    mean = "" if row.mean_tokens is None else f"{row.mean_tokens:.1f}"
    off = "" if row.half_width is None else f" ± {row.half_width:.1f}"
    return [row.model, str(row.rows), str(row.outputs), mean + off, str(row.cut)]


def _cost(row: Costed) -> list[str]:
    return [row.model, _replica(row), str(row.requests), f"{row.before:.0%}", f"{row.after:.0%}"]


def _mean(values: Sequence[float]) -> str:
    if not values:
        return ""
    found = mean_of(values)
    return f"{found.value:.2f}" + (f" ± {found.half_width:.2f}" if found.has_interval else "")


def _replica(row: Switched | Costed) -> str:
    return f"{row.gpu}, tp={row.tp}" + (f", pp={row.pp}" if row.pp > 1 else "")


def _advice(found: Profiled) -> Iterator[str]:
    """What a reader may take for more than it is."""
    for row in found.book.lengths:
        if row.outputs and row.cut > row.outputs / 2:
            yield (
                f"more than half of the outputs of {row.model} were cut at their limit (max_tokens): how long they "
                "would be without it is not known"
            )
    for one in found.book.switches:
        rest = one.start_s[1:]
        if rest and one.start_s[0] > 2 * max(rest):
            yield (
                f"{one.model} took {one.start_s[0]:.1f} s to start at first and {max(rest):.1f} s at most later, when "
                "weights were in the page cache; plans take the mean"
            )


__all__ = ["show", "tell"]
