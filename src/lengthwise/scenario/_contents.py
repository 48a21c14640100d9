"""What the files say that a scenario names."""

from __future__ import annotations

import hashlib
from pathlib import Path

from lengthwise.scenario._places import resolved
from lengthwise.scenario.scenario import Scenario


def contents(whole: Scenario) -> dict[str, str]:
    """A digest by name of every file outside the scenario that decides its answers.

    A folder (of a profile) is told by the names, sizes and times of its files.
    """
    on, of = whole.deployment, whole.scheduler
    policies = (of.policy, of.rank, of.leave, of.batching, of.memory, of.router, of.takeover, of.binning)
    files = [text.rpartition(":")[0] for text in policies if text and ":" in text]
    named = (
        whole.workload.trace,
        whole.predictor.file,
        on.model,
        on.gpu,
        on.node,
        on.cost.partition(":")[2].partition("#")[0],
        *files,
    )
    if whole.search is not None:
        axes = (whole.search.space, *whole.search.either)
        named += tuple(v for a in axes for vs in a.values() for v in (vs if isinstance(vs, list) else [vs]))
    whole_texts = {text for text in named if isinstance(text, str) and text}
    parts = {part for text in whole_texts for part in (text, text.partition(":")[2], text.rpartition(":")[0])}
    parts |= {part.partition("#")[0] for part in parts}  # an estimator after a profile's name
    places = {text: resolved(text, whole.folder) for text in parts if text}
    return {text: _digest(place) for text, place in sorted(places.items()) if place.exists()}


def _digest(place: Path) -> str:
    if place.is_file():
        return hashlib.sha256(place.read_bytes()).hexdigest()
    told = [
        f"{path.relative_to(place)} {path.stat().st_size} {path.stat().st_mtime_ns}"
        for path in sorted(place.rglob("*"))
        if path.is_file()
    ]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()
