"""The answer in sentences, for the terminal and the page."""

from __future__ import annotations

import math
from collections.abc import Iterable

from lengthwise.report._numbers import percent, rounded, seconds
from lengthwise.theory import MultiBinStudy, QueueStudy, share_kept

SHOWN_CUTS = 4
"""So many boundaries are written out."""
LITTLE = 0.05
"""A gain of less than this share is not worth a predictor."""


def answers(study: MultiBinStudy | QueueStudy) -> list[str]:
    """What the study says, a sentence each."""
    return _of_bins(study) if isinstance(study, MultiBinStudy) else _of_queue(study)


def amount(value: float) -> str:
    """A number with three digits."""
    return rounded(value, math.nan)[0]


def cuts_text(cuts_s: Iterable[float]) -> str:
    """Boundaries in a row; of many the first ones and the last."""
    shown = [f"{cut:.4g}" for cut in cuts_s]
    if len(shown) > SHOWN_CUTS:
        shown = [*shown[: SHOWN_CUTS - 1], "..", shown[-1]]
    return " ".join(shown) or "none"


def _of_bins(study: MultiBinStudy) -> list[str]:
    best = max(study.rows, key=lambda row: row.throughput_rps)
    most = study.capacity_rps / study.one_bin_rps - 1
    told = [
        (
            f"{_bins(best.bins)} of batches of {study.batch} serve {amount(best.throughput_rps)} requests a second: "
            f"{percent(best.throughput_rps / study.one_bin_rps - 1)} more than one bin, "
            f"{percent(best.throughput_rps / study.capacity_rps)} of the capacity that infinitely many would reach."
        )
    ]
    if math.isfinite(study.target_rps):
        share = percent(study.target_rps / study.capacity_rps)
        told.append(
            f"{_bins(study.bins_needed)} with known lengths reach {share} of the capacity."
            if study.bins_needed
            else f"No number of bins that was tried reaches {share} of the capacity."
        )
    if most < LITTLE:
        told.append(
            f"No number of bins is worth it here: the lengths differ so little that even infinitely many gain "
            f"{percent(most)}."
        )
    if math.isfinite(study.rate_rps) and study.rate_rps >= study.one_bin_rps:
        enough = next((row.bins for row in study.rows if row.throughput_rps > study.rate_rps), None)
        told.append(
            f"One bin cannot serve {amount(study.rate_rps)} requests a second; "
            + (f"{_bins(enough)} can." if enough else "none of these numbers of bins can with one server.")
        )
    return told


def _of_queue(study: QueueStudy) -> list[str]:
    last = len(study.loads) - 1
    blind, best, guessed = (study.orders[name][last] for name in ("fcfs", "srpt", "sprpt"))
    cut = 1 - best.mean_s / blind.mean_s
    told = [
        (
            f"At a load of {study.loads[last]:g}, knowing every length would cut the mean time from "
            f"{seconds(blind.mean_s)} to {seconds(best.mean_s)} (by {percent(cut)})."
        )
    ]
    if cut >= LITTLE:
        kept = share_kept(blind, guessed, best)
        told.append(
            f"The predictor keeps {percent(kept)} of that."
            if kept > 0
            else "The predictor keeps nothing of that: its order is worse than first come, first served."
        )
    small = [
        load
        for load, fcfs, srpt in zip(study.loads, study.orders["fcfs"], study.orders["srpt"], strict=True)
        if 1 - srpt.mean_s / fcfs.mean_s < LITTLE
    ]
    if small:
        told.append(
            f"Up to a load of {max(small):g} even perfect knowledge gains less than {percent(LITTLE)}: there is "
            "no queue to order, so length-aware scheduling is not worth it."
        )
    return told


def _bins(count: int | None) -> str:
    return "1 bin" if count == 1 else f"{count:,} bins"
