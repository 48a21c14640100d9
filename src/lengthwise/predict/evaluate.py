"""How good a predictor is on samples it has not seen, with intervals over prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.predict import _scores as scores
from lengthwise.predict._known import Known, known_of
from lengthwise.predict.contract import Ints, Predictor, Prompts, Samples, partial
from lengthwise.predict.distribution import Floats, LengthDistribution
from lengthwise.schema.errors import InputError
from lengthwise.schema.estimate import Estimate

WINDOWS = tuple(range(0, 601, 50))
CALIBRATED = np.round(np.arange(0.05, 0.96, 0.05), 2)
_LEAST_RUNNING = 20
_SHOWN = 1500


@dataclass(frozen=True)
class Window:
    """What is known of requests that have produced so many tokens.

    Attributes:
        tokens: So far.
        running: Requests that are not done yet, which the next are about.
        mae: Mean absolute error of the median, tokens.
        r2: Of the mean, against their own mean length.
        tau: Kendall's tau of the median.
        coverage90: Share within the 90 % interval.
        r2_all: R2 over all requests, those that are done counted as known: what a scheduler knows by then.
    """

    tokens: int
    running: int
    mae: Estimate
    r2: Estimate
    tau: Estimate
    coverage90: Estimate
    r2_all: float


@dataclass(frozen=True)
class Evaluation:
    """Scores of a predictor on samples.

    Attributes:
        name: What was evaluated on what.
        requests: Scored; those whose output was cut before the horizon are not among them.
        prompts: Different prompts.
        censored: Samples whose output was cut, scored or not.
        scores: By name: mae, rmse, r2, log_r2, tau, tau_within (mean over models of the tau of each), bias,
            coverage90, width90 (tokens), pinball, and for k = 2, 4, 8 bins of equal mass accuracy_k and
            within_one_k. Points are medians, but those of rmse, r2 and bias means.
        by_model: The same and "requests" for each model.
        windows: What is known after so many tokens.
        calibration: Levels, and the share of lengths below the quantile of each.
        latency_ms: A prompt, by batch size; empty where it was not measured.
        seen: Test prompts that the predictor had learnt from; None where it does not say.
        shown: Columns predicted, low, high, actual, model of some requests, for a figure.
        horizon_tokens: Lengths are scored up to so many; infinite where no output was cut.
        cut_share: Of the samples, cut.
    """

    name: str
    requests: int
    prompts: int
    censored: int
    scores: dict[str, Estimate]
    by_model: dict[str, dict[str, float]]
    windows: tuple[Window, ...]
    calibration: tuple[Floats, Floats]
    latency_ms: dict[int, float] = field(default_factory=dict)
    seen: int | None = None
    shown: dict[str, Any] = field(default_factory=dict)
    horizon_tokens: float = float("inf")
    cut_share: float = 0.0


def evaluate(
    predictor: Predictor,
    samples: Samples,
    *,
    name: str = "",
    windows: Sequence[int] = WINDOWS,
    draws: int = 100,
    seed: int = 0,
    clock: Callable[[], float] | None = time.perf_counter,
) -> Evaluation:
    """The scores of a predictor, with 95 % intervals of a bootstrap over prompts.

    Where outputs were cut, long ones are missing among those that ended, and scores of these alone
    would call a right predictor wrong. So lengths, and what is predicted of them, count up to a horizon:
    the greatest length before which at least a tenth of the requests would not have been cut. A request that
    ended, or reached the horizon, is weighed by one over the chance of not having been cut before
    (Kaplan and Meier on the cuts, taken to be independent of the lengths). MAE, RMSE, R2, bias, pinball loss, bins,
    and coverage are of these with these weights, Kendall's tau of these without. What nobody saw, on which side
    of a quantile beyond the horizon a length lies, is taken at the predictor's word. Without cuts all
    this changes nothing.

    Args:
        predictor: Trained.
        samples: Requests it has not seen.
        name: What to call it.
        windows: Tokens so far at which it is asked again, with the text of so many.
        draws: Of the bootstrap; 0: no intervals.
        seed: Of its draws.
        clock: Seconds; None: latency is not measured.

    Raises:
        InputError: Every output was cut.
    """
    if samples.censored.all():
        raise InputError("every output was cut at a limit, so no true length is known; some must have ended")
    rows, known = known_of(samples.output_tokens, samples.censored)
    kept = samples.take(rows)
    said = predictor.predict(kept.prompts)
    group = scores.groups(kept.prompts, len(kept))
    again = scores.resampled(group, draws, seed)
    model = np.array([str(m) for m in kept.prompts.model or [""] * len(kept)], object)
    return Evaluation(
        name,
        len(kept),
        int(group.max()) + 1,
        int(samples.censored.sum()),
        scores.of_all(said, known, model, again),
        {str(m): _of_model(said, known, np.flatnonzero(model == m)) for m in sorted(set(model))},
        tuple(_windows(predictor, kept, known, windows, group, draws, seed)),
        (CALIBRATED, np.array([_share_below(said, known, p) for p in CALIBRATED])),
        {n: latency_ms(predictor, kept.prompts, n, clock) for n in (1, 32)} if clock else {},
        _seen(predictor, kept.prompts),
        _some(said, kept, model, seed),
        known.horizon,
        float(samples.censored.mean()),
    )


def latency_ms(
    predictor: Predictor, prompts: Prompts, batch: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Milliseconds a prompt, the median over batches of so many prompts, each another where there are enough."""
    starts = np.random.default_rng(0).integers(0, max(1, len(prompts) - batch + 1), 40)
    rows = [(start + np.arange(batch)) % len(prompts) for start in starts]
    taken = []
    for part in [prompts.take(r) for r in rows]:
        before = clock()
        predictor.predict(part)
        taken.append((clock() - before) / batch * 1e3)
    return float(np.median(taken))


def _of_model(said: LengthDistribution, known: Known, rows: Ints) -> dict[str, float]:
    found = scores.points(said.take(rows), known.take(rows), np.zeros(len(rows), object))
    return {"requests": float(len(rows)), **found}


def _share_below(said: LengthDistribution, known: Known, level: float) -> float:
    below = known.below(said, scores.whole(said.quantile(level)), level)
    return float(np.average(below, weights=known.weight))


def _windows(
    predictor: Predictor,
    kept: Samples,
    known: Known,
    windows: Sequence[int],
    group: Ints,
    draws: int,
    seed: int,
) -> list[Window]:
    y, w = known.tokens, known.weight
    whole = float((w * (y - np.average(y, weights=w)) ** 2).sum())
    made = []
    for so_far in windows:
        rows = np.flatnonzero(y > so_far)
        if len(rows) < _LEAST_RUNNING:
            break
        part, still = kept.take(rows), known.take(rows)
        tokens = np.full(len(rows), so_far, np.int64)
        prompts = part.prompts
        if so_far and part.output is not None and any(part.output):
            prompts = partial(prompts, part.output, part.output_tokens, tokens)
        said = predictor.predict(prompts, tokens)
        again = scores.resampled(group[rows], draws, seed)
        found = scores.of_some(said, still, again, ("mae", "r2", "tau", "coverage90"))
        error = float((still.weight * (still.mean(said) - still.tokens) ** 2).sum())
        r2_all = 1 - error / whole if whole > 0 else float("nan")
        made.append(
            Window(so_far, len(rows), found["mae"], found["r2"], found["tau"], found["coverage90"], r2_all)
        )
    return made


def _seen(predictor: Any, prompts: Prompts) -> int | None:
    """Different test prompts that the predictor says it has learnt from."""
    known = getattr(predictor, "knows", None)
    if known is None or prompts.text is None:
        return None
    distinct = sorted({text.strip() for text in prompts.text})
    return int(np.sum(known(distinct)))


def _some(said: LengthDistribution, kept: Samples, model: npt.NDArray[Any], seed: int) -> dict[str, Any]:
    rows = np.sort(np.random.default_rng(seed).permutation(len(kept))[:_SHOWN])
    part = said.take(rows)
    return {
        "predicted": part.median,
        "low": part.quantile(0.05),
        "high": part.quantile(0.95),
        "actual": kept.output_tokens[rows],
        "model": [str(m) for m in model[rows]],
    }
