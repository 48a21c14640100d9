"""LLMServingSim's profiles as ours: which of its two layouts a folder has, and who reads it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lengthwise.cost._vidur_paths import csv_file, has_csv
from lengthwise.schema.errors import ProfileError
from lengthwise.schema.profile import Profile, ProfileFacts

if TYPE_CHECKING:
    import polars as pl

_DEGREE = re.compile(r"tp(\d+)$")


@dataclass
class Shard:
    """One tpN folder, and what a reader must know of it."""

    folder: Path
    tp: int
    notes: list[str]

    def read(self, name: str, needed: tuple[str, ...]) -> pl.DataFrame | None:
        """The rows of one of its CSV files; None where there is none."""
        from lengthwise.cost.profiles._assembled import read_csv

        return read_csv(csv_file(self.folder, name), needed) if has_csv(self.folder, name) else None


def import_llmservingsim(folder: Path | str) -> Profile:
    """The profile of a folder with tp1/, tp2/ ..., laid out by LLMServingSim's profiler v0 or v1.

    v0 is HARDWARE/ORGANISATION/MODEL/tpN/{layers,attention}.csv, v1 .../VARIANT/meta.yaml and
    tpN/{dense,attention,per_sequence,moe,skew}.csv. All TP degrees go in; notes of the profile's facts say
    what was left out or converted.

    Raises:
        ProfileError: It has neither layout, or a file lacks a column; says what is there.
    """
    root = Path(folder)
    notes: list[str] = []
    shards = _shards(root, notes)
    v0, v1 = (any(has_csv(one.folder, name) for one in shards) for name in ("layers", "dense"))
    if v0 == v1:
        from lengthwise.cost.profiles._assembled import names_in

        raise ProfileError(
            f"{shards[0].folder} must hold layers.csv (v0) or dense.csv (v1) of LLMServingSim, not both; it "
            f"holds {names_in(shards[0].folder)}"
        )
    return _made(root, shards, notes, newer=v1)


def _made(root: Path, shards: list[Shard], notes: list[str], *, newer: bool) -> Profile:
    from lengthwise.cost.profiles import _llmservingsim_v0, _llmservingsim_v1
    from lengthwise.cost.profiles._assembled import assembled

    facts: Callable[[Path], ProfileFacts]
    facts, rows = (
        (_llmservingsim_v1.facts, _llmservingsim_v1.rows)
        if newer
        else (_llmservingsim_v0.facts, _llmservingsim_v0.rows)
    )
    about = facts(root)
    frames = [frame for shard in shards for frame in rows(shard, root)]
    whole = ProfileFacts(**{**vars(about), "notes": (*about.notes, *dict.fromkeys(notes))})
    return assembled(whole, frames, root)


def _shards(root: Path, notes: list[str]) -> list[Shard]:
    from lengthwise.cost.profiles._assembled import names_in

    if not root.is_dir():
        raise ProfileError(
            f"an LLMServingSim profile must be a folder with tp1/, tp2/ ...; {root} is not one"
        )
    found = [
        (int(m[1]), path) for path in root.iterdir() if path.is_dir() and (m := _DEGREE.match(path.name))
    ]
    if not found:
        raise ProfileError(
            f"{root} must hold tp1/, tp2/ ... of LLMServingSim's profiler; it holds {names_in(root)}"
        )
    return [Shard(path, tp, notes) for tp, path in sorted(found)]
