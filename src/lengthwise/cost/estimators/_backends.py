"""Whose kernels speak: one library of several that a profile measured, and the attention's by name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import ProfileError
from lengthwise.schema.profile import OPERATOR_PARTS, Profile


def of_backend(rows: Profile, asked: str, notes: list[str]) -> Profile:
    """Rows of one backend an operator: of the one asked for, else of graphs, else of the one that has most.

    Args:
        rows: Of any backends.
        asked: A backend's name or a part of it, in any case; "" leaves the choice.
        notes: Gets which was taken of several, and which others there are.

    Raises:
        ProfileError: No operator has rows of the backend asked for; lists those that there are.
    """
    keep = np.ones(len(rows), dtype=bool)
    found = False
    for operator in rows.operators:
        own = rows["operator"] == operator
        names, counts = np.unique(rows["backend"][own], return_counts=True)
        wanted = _matching(names, asked)
        found = found or bool(asked and wanted.any())
        if len(names) > 1:
            best = _best(names, counts, wanted)
            keep &= ~own | (rows["backend"] == best)
            notes.append(_told(operator, best, names.tolist(), asked if wanted.any() else ""))
    if asked and not found:
        there = ", ".join(sorted(set(rows["backend"].tolist()) - {""})) or "none with a name"
        raise ProfileError(
            f"the profile {rows.facts.name} has no rows of the backend {asked}; its backends are: {there}"
        )
    return rows.where(keep)


def of_attention(rows: Profile, asked: str, uses: Callable[[str], bool], notes: list[str]) -> None:
    """Nothing; the notes get whose attention was measured.

    Args:
        rows: Of one backend an operator.
        asked: The deployment's backend, as of ``of_backend``; "" where it does not say.
        uses: Whether the deployment has an operator.
        notes: Gets the names, where they are known.

    Raises:
        ProfileError: Some attention was measured with the backend asked for, and some of the deployment's was not.
    """
    named = {name: _names(rows, name) for name in rows.operators if _is_attention(name) and uses(name)}
    named = {name: names for name, names in named.items() if names}
    others = {name: names for name, names in named.items() if not _matching(np.array(names), asked).any()}
    if not others:
        return
    told = "; ".join(f"{name} with {', '.join(names)}" for name, names in others.items())
    if len(others) < len(named):
        raise ProfileError(
            f"the profile {rows.facts.name} must be of the attention backend {asked}; it has {told} alone. Use a "
            f"profile of {asked}, or name no backend"
        )
    but = f", not with {asked}" if asked else ": right if the deployment's is the same"
    notes.append(f"measured {told}{but}")


def _is_attention(operator: str) -> bool:
    return OPERATOR_PARTS[operator] in ("prefill", "decode")


def _names(rows: Profile, operator: str) -> list[str]:
    return sorted(set(rows.of(operator)["backend"].tolist()) - {""})


def _matching(names: npt.NDArray[np.str_], asked: str) -> npt.NDArray[np.bool_]:
    return np.array([bool(asked) and asked.lower() in str(name).lower() for name in names], dtype=bool)


def _best(names: npt.NDArray[np.str_], counts: npt.NDArray[np.int64], wanted: npt.NDArray[np.bool_]) -> str:
    """The one asked for; else what engines run in steps of decodes (graphs); else the one with most rows."""
    graphs = np.array(["graph" in str(name) for name in names])
    return str(names[np.lexsort((counts, graphs, wanted))[-1]])


def _told(operator: str, best: str, names: list[str], asked: str) -> str:
    others = ", ".join(name or "an unnamed backend" for name in names if name != best)
    why = "as asked" if asked else "the most rows, or graphs"
    taken = f"{best or 'an unnamed backend'} taken ({why})"
    return f"{operator}: rows of {taken}, those of {others} left out; #@NAME chooses"
