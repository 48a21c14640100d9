"""When a prediction is too far off: bounds that noise widens, up to an end."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lengthwise.measure.calibration import Iterations
from lengthwise.schema.records import RunResult

if TYPE_CHECKING:
    from _circle import Lengths, Run

    from lengthwise import Workload

METRICS = ("jct_p50", "jct_p95", "ttft_p50", "tpot_p50")
OVER_LOADS = ("jct_p50", "jct_p95", "tpot_p50")
"""Judged over all loads, too. Of so small a model TTFT below capacity is milliseconds of HTTP."""
ENOUGH = 5
WITHIN = 0.35
"""Of the measured median, and as much again as the engine's own repeats lie apart."""
MOST = 0.60
"""Whatever the repeats do."""
TOO_NOISY = 0.50
"""Where repeats of the very same requests lie further from their median, nothing can be judged."""

MIN_COUNT, MAX_REQUESTS, LASTS_S = 64, 600, 6.0
"""Of a load: requests, and seconds. One second of load on a quick engine measures mostly the client."""

Errors = Mapping[str, Mapping[str, float]]
QUEUED, FREE = "static", "half"
"""Loads: all at once beyond the slots, where all requests wait, and half of the capacity, where hardly any do."""


def lasting(rate_rps: float, seconds: float = LASTS_S) -> int:
    """Requests of a load at a rate."""
    return min(MAX_REQUESTS, max(MIN_COUNT, int(seconds * rate_rps)))


def arriving(lengths: Lengths, tokens_s: float, seed: int, name: str = "") -> Workload:
    """Requests of a load of so many output tokens a second."""
    return lengths.arriving(tokens_s, LASTS_S, seed, name, least=MIN_COUNT, most=MAX_REQUESTS)


def served_rps(measured: RunResult) -> float:
    """Requests a second of a whole run, were it as short as a client's standing still for a moment."""
    r = measured.records.requests
    return len(r.finished_s) / float(np.nanmax(r.finished_s) - r.arrival_s.min())


def out_of_order(seconds: Mapping[str, Mapping[str, float]]) -> list[str]:
    """In words, where a load that queues is not slower than one that does not: what no busy machine turns round.

    Args:
        seconds: Median TTFT by who says so ("measured", "simulated") and by setting and load ("wide-static").
    """
    wrong = []
    for who, of in seconds.items():
        for setting in sorted({load.partition("-")[0] for load in of}):
            queued, free = (of.get(f"{setting}-{load}") for load in (QUEUED, FREE))
            if queued is not None and free is not None and not queued > free:
                wrong.append(f"{who}, {setting}: TTFT of all at once {queued:.3g} s, at half of capacity {free:.3g} s")
    return wrong


def drift(learnt: Iterations, report: Iterations, max_num_seqs: int) -> float:
    """How much faster or slower the machine did the very same steps in one log than in the other, relative.

    Of steps of as many decodes and no prompt, up to ``max_num_seqs``, the medians; over these steps the median.
    """
    off = []
    for decodes in range(1, max_num_seqs + 1):
        seconds = [log.seconds[(log.prefill_tokens == 0) & (log.decode_seqs == decodes)] for log in (learnt, report)]
        if min(map(len, seconds)) >= ENOUGH:
            off.append(abs(float(np.median(seconds[0]) / np.median(seconds[1])) - 1))
    return statistics.median(off) if off else 0.0


def seen_steps(runs: Sequence[RunResult]) -> Iterations:
    """The steps that runs were served in, of engines that keep them with each run."""
    steps = [run.records.steps for run in runs]
    column = {
        name: np.concatenate([getattr(of, name) for of in steps]).astype(np.float64)
        for name in ("prefill_seqs", "prefill_tokens", "decode_seqs")
    }
    seconds = np.concatenate([of.end_s - of.start_s for of in steps])
    once = np.ones(len(seconds), dtype=np.int64)
    return Iterations(**column, kv_share=np.full(len(seconds), np.nan), seconds=seconds, steps=once)


def judged(errors: Errors, spreads: Errors, each: str, metrics: Sequence[str] = METRICS) -> tuple[list[str], list[str]]:
    """What is too far off, and what was too noisy to tell, in words.

    Args:
        errors: By load and metric: simulated against the median of the measured repeats, relative.
        spreads: By load and metric: how far repeats lie from their median, and the machine's drift.
        each: The load of which every metric is judged by itself; of all together the median is.
        metrics: Those that are judged.
    """
    wrong, noisy = [], []
    for metric in metrics:
        cases = {each: (abs(errors[each][metric]), spreads[each][metric])}
        if metric in OVER_LOADS:
            error, spread = (statistics.median(abs(of[load][metric]) for load in errors) for of in (errors, spreads))
            cases["the median load"] = (error, spread)
        for name, (error, spread) in cases.items():
            reported = f"{metric} of {name}: {error:.0%} off, repeats {spread:.0%} apart"
            if spread > TOO_NOISY:
                noisy.append(reported)
            elif error > min(MOST, WITHIN + spread):
                wrong.append(reported)
    return wrong, noisy


def of_median_repeat(errors: Errors, runs: Sequence[Run], metric: str) -> float:
    """The simulated against the median of what the repeats of a load measured, relative."""
    import _circle

    real = [_circle.quantiles(run.measured.records)[metric] for run in runs]
    message = [(1 + errors[run.name][metric]) * seconds for run, seconds in zip(runs, real, strict=True)]
    return statistics.median(message) / statistics.median(real) - 1
