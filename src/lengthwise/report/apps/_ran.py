"""What engines did in a run, from the events of its manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Lane = tuple[str, int]
"""A row of the chart: ("", a GPU's number), or (a model, the number of a given engine)."""
_OPENS = {"start": "load", "wake": "load", "ready": "run"}
_CLOSES = ("stop", "sleep", "died")


@dataclass(frozen=True)
class Spell:
    """What one GPU, or one given engine, did for a while.

    Attributes:
        lane: Whose row it is in.
        model: Its name.
        what: "load" or "run".
        start_s: From when.
        end_s: Until when.
        ended: The event that ended it; "": the run's end.
    """

    lane: Lane
    model: str
    what: str
    start_s: float
    end_s: float
    ended: str = ""


def is_given(manifest: Mapping[str, Any]) -> bool:
    """Whether its engines were run by others, so that nobody knows their GPUs."""
    return any(plan["gpu"] == "given" for stage in manifest.get("plan", ()) for plan in stage)


def lanes_of(manifest: Mapping[str, Any], gpus: Sequence[str]) -> dict[Lane, str]:
    """The rows and their names."""
    if not is_given(manifest):
        used = {gpu for event in manifest["events"] for gpu in event["gpus"]}
        count = max(len(gpus), 1 + max(used, default=-1))
        return {("", k): gpus[k] if k < len(gpus) else f"GPU {k}" for k in range(count)}
    engines = sorted({(e["model"], gpu) for e in manifest["events"] if e["model"] for gpu in e["gpus"]})
    return {(model, gpu): f"{model} {gpu}" for model, gpu in engines}


def spells_of(manifest: Mapping[str, Any]) -> list[Spell]:
    """What each did, in the order of events."""
    given, end_s = is_given(manifest), float(manifest["seconds"])
    open_: dict[Lane, tuple[str, str, float]] = {}
    found: list[Spell] = []

    def close(lane: Lane, at_s: float, by: str) -> None:
        if lane in open_:
            model, what, start_s = open_.pop(lane)
            if at_s > start_s:
                found.append(Spell(lane, model, what, start_s, at_s, by))

    for event in manifest["events"]:
        what, at_s = event["what"], float(event["at_s"])
        for gpu in event["gpus"] if event["model"] else ():
            lane = (event["model"], gpu) if given else ("", gpu)
            if what in _OPENS or what in _CLOSES:
                close(lane, at_s, what)
            if what in _OPENS:
                open_[lane] = (event["model"], _OPENS[what], at_s)
    for lane in list(open_):
        close(lane, end_s, "")
    return found


def worked_s(spells: Sequence[Spell]) -> dict[str, tuple[float, float]]:
    """By model, when an engine of it was first ready and when the last one ended."""
    found: dict[str, tuple[float, float]] = {}
    for spell in spells:
        if spell.what == "run":
            first, last = found.get(spell.model, (spell.start_s, spell.end_s))
            found[spell.model] = (min(first, spell.start_s), max(last, spell.end_s))
    return found


def happened(manifest: Mapping[str, Any]) -> dict[str, int]:
    """How often each kind of event was."""
    found: dict[str, int] = {}
    for event in manifest["events"]:
        found[event["what"]] = found.get(event["what"], 0) + 1
    return found
