"""Which runs, or which of their requests, are fitted to and which are held out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from lengthwise.measure.calibrate._checks import check_different, check_runs
from lengthwise.measure.calibrate._lateness import harmless_lateness, lateness_moves
from lengthwise.measure.calibrate._runs import Run, run_of
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError
from lengthwise.schema.measured import Measured

SEVERAL = 3
"""Loads of which whole ones are held out: the least and the most stay."""


@dataclass(frozen=True)
class Split:
    """All runs, how they were parted in words, and what a reader must know of that."""

    runs: tuple[Run, ...]
    words: str
    notes: tuple[str, ...] = ()

    @property
    def fitted(self) -> list[Run]:
        """Those with requests that are fitted to."""
        return [run for run in self.runs if run.fit.any()]

    @property
    def held(self) -> list[Run]:
        """Those with requests that are held out."""
        return [run for run in self.runs if run.held.any()]


def split_of(
    runs: Sequence[Measured],
    deployment: Deployment,
    holdout: float | Sequence[Measured],
    allow: Collection[str],
) -> Split:
    """Runs that are held out were given, or are whole loads between the least and the most, or the last requests.

    Repeats (runs of equal requests) go to one side together.

    Raises:
        InputError: There is nothing to fit or to hold out, or a run cannot be taken.
    """
    given = list(holdout) if isinstance(holdout, Sequence) else []
    share = float(holdout) if isinstance(holdout, float | int) else 0.0
    if not runs or (not given and not 0 < share < 1):
        raise InputError(
            "a calibration needs one run or more, and something to hold out: a share above 0 and below 1, or runs; "
            f"there are {len(runs)} runs, and holdout is {share}"
        )
    every = [*runs, *given]
    names = _names(every)
    check_runs(every, names, deployment, allow)
    check_different(every, names)
    shares, words = _shares(runs, given, names, share)
    each = zip(every, names, shares, strict=True)
    notes = (*(_repeats(every, names, len(runs)) if given else ()), *_late(every, names))
    return Split(tuple(run_of(measured, name, part) for measured, name, part in each), words, notes)


def _late(every: Sequence[Measured], names: Sequence[str]) -> tuple[str, ...]:
    """What is told of a late client and yet is no reason to refuse its run."""
    return tuple(
        f"{name}: {doubt}; without it TTFT's mean and 95th percentile would be {lateness_moves(run):.1%} shorter at "
        "most, which no fit can feel, so the run was taken"
        for run, name in zip(every, names, strict=True)
        for doubt in harmless_lateness(run)
    )


def _shares(
    runs: Sequence[Measured], given: Sequence[Measured], names: Sequence[str], share: float
) -> tuple[list[float], str]:
    """How much of each run is held out, and that in words."""
    if given:
        words = f"fitted to {_counted(len(runs))}, held out {_counted(len(given))}"
        return [0.0] * len(runs) + [1.0] * len(given), words
    loads = _loads(runs)
    if len(loads) >= SEVERAL:
        away = _middle(runs, loads, share)
        held = ", ".join(names[r] for r in sorted(away))
        words = f"fitted to {_counted(len(runs) - len(away))}, held out {held}"
        return [1.0 if r in away else 0.0 for r in range(len(runs))], words
    words = (
        f"fitted to the first {1 - share:.0%} of the requests{' of each run' if len(runs) > 1 else ''}, held out "
        "the last ones, which were simulated in the same queue"
    )
    return [share] * len(runs), words


def _counted(n: int) -> str:
    return f"{n} run{'s' if n > 1 else ''}"


def _names(runs: Sequence[Measured]) -> list[str]:
    """A name for each run; equal ones are numbered."""
    given = [measured.records.name or measured.workload.name or "run" for measured in runs]
    return [name if given.count(name) == 1 else f"{name} {i + 1}" for i, name in enumerate(given)]


def _requests(measured: Measured) -> tuple[object, ...]:
    """What repeats of a run have in common: lengths asked for, gaps between arrivals (to 1 ms), concurrency."""
    w = measured.workload
    arrival_s = np.round(w.arrival_s - np.min(w.arrival_s, initial=np.inf), 3)
    return w.prompt_tokens.tobytes(), w.output_tokens.tobytes(), arrival_s.tobytes(), w.concurrency


def _loads(runs: Sequence[Measured]) -> list[list[int]]:
    """The runs in groups of equal requests, in the order of the first ones."""
    found: dict[tuple[object, ...], list[int]] = {}
    for r, measured in enumerate(runs):
        found.setdefault(_requests(measured), []).append(r)
    return list(found.values())


def _middle(runs: Sequence[Measured], loads: Sequence[Sequence[int]], share: float) -> set[int]:
    """Which runs to hold out: spread over the loads with all their repeats, but neither the least nor the most."""
    order = sorted(loads, key=lambda own: (float(np.mean([_load(runs[r]) for r in own])), own[0]))
    inner = order[1:-1]
    count = min(len(inner), max(1, round(share * len(loads))))
    return {r for i in range(count) for r in inner[(2 * i + 1) * len(inner) // (2 * count)]}


def _load(measured: Measured) -> float:
    r = measured.records.requests
    span = float(np.nanmax(r.finished_s) - np.nanmin(r.arrival_s))
    return float(np.nansum(r.finished_s - r.arrival_s)) / max(span, 1e-9)


def _repeats(every: Sequence[Measured], names: Sequence[str], fitted: int) -> tuple[str, ...]:
    """A note on each run that is held out although the same requests were fitted to."""
    known = {_requests(measured): name for measured, name in zip(every[:fitted], names, strict=False)}
    return tuple(
        f"{name} is a repeat of a run that was fitted ({known[key]}): it tells noise, not a new load"
        for measured, name in zip(every[fitted:], names[fitted:], strict=True)
        for key in (_requests(measured),)
        if key in known
    )
