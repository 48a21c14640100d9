"""Cells of terminal tables for profiles and for their comparisons."""

from __future__ import annotations

from lengthwise.cost.profiles import ProfileCheck, ProfileView
from lengthwise.report.profile import axes_text, share_text, time_text

OPERATOR_HEADS = ("operator", "TP", "dtype", "points", "sizes", "time", "spread", "of roofline", "best")
CHECK_HEADS = ("operator", "TP", "dtype", "sizes", "points", "new / old", "from", "to")
_MAX_GAPS = 4


def operator_cells(view: ProfileView) -> list[list[str]]:
    """Return the table row of each operator. The columns are ``OPERATOR_HEADS``."""
    rows = []
    for operator in view.operators:
        low, high = operator.seconds
        rows.append(
            [
                operator.operator,
                str(operator.tp or "-"),
                operator.dtype or "-",
                f"{len(operator.rows):,}",
                axes_text(operator),
                time_text(low) if low == high else f"{time_text(low)} to {time_text(high)}",
                share_text(operator.spread),
                share_text(operator.median.roofline if operator.median else None),
                share_text(operator.best.roofline if operator.best else None),
            ]
        )
    return rows


def profile_notes(view: ProfileView) -> list[str]:
    """Return notes: operators without points in a region, the profile's own notes, and why a roofline is missing."""
    gaps: dict[str, list[str]] = {}
    for operator in view.operators:
        if operator.gaps:
            more = len(operator.gaps) - _MAX_GAPS
            text = "; ".join(map(str, operator.gaps[:_MAX_GAPS])) + (f"; and {more} more" if more > 0 else "")
            gaps.setdefault(text, []).append(operator.operator)
    metadata = view.profile.metadata
    notes = [f"no points at {text}: {', '.join(dict.fromkeys(names))}" for text, names in gaps.items()]
    notes += [f"note: {note}" for note in metadata.notes]
    if any(operator.best for operator in view.operators):
        return notes
    if view.work is None:
        missing = f"GPU {metadata.gpu!r}; give it (--gpu NAME or FILE.toml)"
    elif metadata.model:
        missing = f"model {metadata.model!r}; give it (--model NAME or config.json)"
    else:
        return notes
    return [*notes, f"note: no roofline: the catalog has no {missing}"]


def check_cells(found: ProfileCheck) -> list[list[str]]:
    """Return table rows (``CHECK_HEADS``) of changed operators, or of the five largest changes if none changed."""
    rows = []
    for row in found.changed or sorted(found.rows, key=lambda row: -abs(row.ratio - 1))[:5]:
        low, high = row.sizes
        sizes = f"{row.region}: {low:,} to {high:,} {row.unit}" if low != high else f"{low:,} {row.unit}"
        ratios = (f"{value:.3f}" for value in (row.ratio, row.low, row.high))
        rows.append([row.operator, str(row.tp or "-"), row.dtype or "-", sizes, f"{row.points:,}", *ratios])
    return rows
