"""Small pieces of HTML that several sections share."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lengthwise.report._rows import Cell
from lengthwise.report.result import Result

SERIES = 8
"""Colours of variants; beyond so many they come again with another dash."""


def swatch(index: int) -> str:
    """A variant's colour."""
    return f'<i class="swatch" style="--c:var(--series-{index % SERIES})"></i>'


def variant_heads(results: Sequence[Result], skip: int = 0) -> str:
    """The head of a table with a column a variant, all but the first ``skip``."""
    shown = list(enumerate(results))[skip:]
    heads = "".join(f'<th scope="col">{swatch(i)}{escape(r.name)}</th>' for i, r in shown)
    return f"<thead><tr><td></td>{heads}</tr></thead>"


def scrolling(label: str, table: str, kind: str = "") -> str:
    """A table that scrolls inside its box where it is wider than the screen, by keyboard too."""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">'
        f'<table class="{kind}">{table}</table></div>'
    )


def interval(cell: Cell) -> str:
    """The intervals behind a value, of chance and of the cost model; nothing where they are not known."""
    half = f' <span class="half">{cell.interval}</span>' if cell.interval else ""
    return half + (f' <span class="half model">{cell.model}</span>' if cell.model else "")
