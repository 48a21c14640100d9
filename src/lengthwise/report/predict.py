"""Scores of length predictors: a page and a JSON file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lengthwise.predict.evaluation import MIN_PROMPTS, Evaluation, Window
from lengthwise.report.curves import json_numbers
from lengthwise.report.formatting import PLUS_MINUS, rounded
from lengthwise.report.html_page import TableCell, write_page
from lengthwise.report.json_file import json_text
from lengthwise.report.summary_table import bounded_texts
from lengthwise.schema.errors import InputError

BINS = (2, 4, 8)
MIN_SURE = 100  # requests below which scores are unreliable
_MIN_ORDER = 0.15
WORDS: dict[str, str] = {
    "mae": "mean absolute error of the median, tokens",
    "rmse": "root mean square error of the mean, tokens",
    "bias": "bias of the mean, tokens",
    "r2": "R2 of the mean",
    "log_r2": "R2 of log tokens",
    "tau": "Kendall's tau",
    "tau_within": "Kendall's tau within a model",
    **{f"accuracy_{bins}": f"exact, {bins} bins" for bins in BINS},
    **{f"within_one_{bins}": f"within one of {bins} bins" for bins in BINS},
    "coverage90": "inside the 90 % interval",
    "width90": "width of the 90 % interval, tokens",
    "pinball": "pinball loss, tokens",
}
MODEL_HEADS = {"requests": "requests", "tau": "tau", "mae": "MAE, tokens", "bias": "bias, tokens"}
MODEL_HEADS |= {"coverage90": "inside 90 %", "width90": "width of 90 %, tokens"}


def _texts(name: str, value: float, half_width: float = math.nan) -> tuple[str, str, str]:
    """Return a score, "± half-width" (or "" if the half-width is unknown), and the unit of both."""
    is_share = name.startswith(("accuracy", "within", "coverage"))
    if is_share:
        return *bounded_texts(100 * value, 100 * half_width, 100), " %" if math.isfinite(value) else ""
    middle, half = rounded(value, half_width)
    return middle, f"{PLUS_MINUS} {half}" if half else "", ""


def score_text(name: str, value: float, half_width: float = math.nan) -> str:
    """Return a score with its interval ("84.2 ± 1.1 %")."""
    middle, half, unit = _texts(name, value, half_width)
    return f"{middle} {half}".strip() + unit


def r2_text(value: float) -> str:
    """Return R2 with two digits, or "below -1", where the predicted mean is useless."""
    return "below -1" if value < -1 else f"{value:.2f}"


def warnings(one: Evaluation) -> list[str]:
    """Return the reasons for which an evaluation's scores are unfair, unreliable or useless."""
    lines = []
    if one.prompts < MIN_PROMPTS:
        lines.append(f"{one.prompts} prompts are too few for intervals of the scores, which need {MIN_PROMPTS}")
    if one.seen:
        lines.append(f"not a fair test: {one.seen:,} of these {one.prompts:,} prompts were trained on")
    if one.scores["r2"].value < 0:
        lines.append("R2 is below 0: the mean of these lengths is a better prediction than the predicted mean")
    requests, tau = one.mathematics
    if requests >= MIN_SURE and tau < _MIN_ORDER:
        lines.append(f"{requests:,} requests ask for mathematics; their order is hardly predicted (tau {tau:.2f})")
    few = [w for w in one.windows if w.running < MIN_SURE]
    if few:
        lines.append(f"from {few[0].tokens:,} tokens so far, fewer than {MIN_SURE} requests run: scores are unreliable")
    useless = [f"{w.tokens:,}" for w in one.windows[1:] if w.r2.value < 0]
    if useless:
        lines.append(f"R2 among running requests is below 0 at {', '.join(useless)} tokens so far")
    worse = [f"{w.tokens:,}" for w in one.windows if w.mae.value > 1.02 * w.mae_conditioned]
    if worse:
        lines.append(f"reading the output so far is worse than survival alone at {', '.join(worse)} tokens so far")
    return lines


def repredictions(one: Evaluation) -> str:
    """Return a phrase on when a predictor reads the output generated so far, with losses on held-out prompts."""
    losses = "; ".join(
        f"{band.repredicted:.3g} instead of {band.conditioned:.3g} at {band.first:,} to {band.last:,}"
        for band in one.held_out
    )
    if one.reads_output is None:
        evidence = f"held-out prompts do not show that reading the output is better; pinball loss {losses}"
        reason = evidence if losses else "it has not learned to read outputs"
        return f"after the first token: the first prediction given the tokens so far ({reason})"
    low, high = one.reads_output
    return f"reads the output so far at {low:,} to {high:,} tokens" + (losses and f" (pinball loss held out: {losses})")


def write_predict_html(
    path: Path | str,
    found: Sequence[Evaluation],
    metadata: Mapping[str, Any] | None = None,
    *,
    heading: str = "Predicted lengths",
) -> None:
    """Write a self-contained HTML page with evaluations side by side."""
    if not found or len({one.name for one in found}) < len(found):
        raise InputError("a page needs at least one evaluation, and each needs a unique name")
    scores = []
    for name, words in WORDS.items():
        if name in found[0].scores:
            cells = (_texts(name, one.scores[name].value, one.scores[name].half_width) for one in found)
            scores.append(
                [words, *(TableCell(middle, half + unit) if half else middle + unit for middle, half, unit in cells)]
            )

    def row(model: str, values: Mapping[str, float]) -> list[str]:
        scores = [f"{values[k]:,.0f}" if k == "requests" else score_text(k, values[k]) for k in MODEL_HEADS]
        return [model or "unknown model", *scores]

    models = [(one.name, [row(model, scores) for model, scores in one.by_model.items()]) for one in found]
    write_page(
        path,
        "predict",
        data=_figures(found),
        heading=heading,
        metadata=_header(found[0], metadata or {}),
        names=[one.name for one in found],
        scores=scores,
        has_windows=len(found[0].windows) > 1,
        model_heads=["", *MODEL_HEADS.values()],
        models=models,
    )


def _header(first: Evaluation, metadata: Mapping[str, Any]) -> list[str]:
    parts = [f"{first.requests:,} requests, {first.prompts:,} prompts, {len(first.by_model)} models"]
    if "samples" in metadata:
        parts.append(f"trained on {metadata['samples']:,} samples of {metadata.get('prompts', 0):,} prompts")
    if cut := first.censoring.samples:
        parts.append(f"{cut:,} outputs ({100 * first.censoring.share:.3g} %) were cut off")
    parts += warnings(first)
    return parts + [f"{ms:.3f} ms per prompt at batch {n}" for n, ms in first.latency_ms.items()]


def _figures(found: Sequence[Evaluation]) -> dict[str, Any]:
    pairs = found[0].shown

    def by_bins(one: Evaluation, score: str) -> list[float | None]:
        return json_numbers(one.scores[f"{score}_{k}"].value for k in BINS)

    return {
        "names": [one.name for one in found],
        "calibration": [
            {"x": json_numbers(level), "y": json_numbers(share)} for level, share in (o.calibration for o in found)
        ],
        "mae": [_windows(one, lambda w: w.mae.value, lambda w: w.mae.half_width) for one in found],
        "r2": [_windows(one, lambda w: w.r2_all) for one in found],
        "tau": [_windows(one, lambda w: w.tau.value, lambda w: w.tau.half_width) for one in found],
        "bins": [{"exact": by_bins(one, "accuracy"), "near": by_bins(one, "within_one")} for one in found],
        "pairs": {key: json_numbers(pairs[key]) for key in ("predicted", "low", "high", "actual")}
        | {"model": pairs["model"]},
    }


def _windows(
    one: Evaluation, value: Callable[[Window], float], half: Callable[[Window], float] | None = None
) -> dict[str, Any]:
    halves = json_numbers(map(half, one.windows)) if half else []
    return {"x": [w.tokens for w in one.windows], "y": json_numbers(map(value, one.windows)), "half": halves}


def predict_json(found: Sequence[Evaluation], metadata: Mapping[str, Any] | None = None) -> str:
    """Return all scores as the text of a JSON file."""
    evaluations = []
    for one in found:
        level, share = one.calibration
        fields = {f.name: getattr(one, f.name) for f in dataclasses.fields(one) if f.name != "shown"}
        evaluations.append(fields | {"calibration": {"level": level, "share": share}})
    return json_text("prediction", {"predictor": dict(metadata or {}), "evaluations": evaluations})
