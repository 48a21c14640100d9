"""Scores of predictors to people: a page, and a file for machines."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.predict.evaluation import Evaluation, Window
from lengthwise.report.formatting import UNKNOWN, rounded
from lengthwise.report.html_document import asset, document, header, plotly_js, scrolling, section, swatch
from lengthwise.report.json_file import plain
from lengthwise.schema.errors import InputError
from lengthwise.schema.files import write_whole

WORDS: dict[str, str] = {
    "mae": "mean absolute error, tokens",
    "rmse": "root mean square error, tokens",
    "bias": "bias, tokens",
    "r2": "R2",
    "log_r2": "R2 of log tokens",
    "tau": "Kendall's tau",
    "tau_within": "Kendall's tau within a model",
    "accuracy_2": "right of 2 bins",
    "accuracy_4": "right of 4 bins",
    "accuracy_8": "right of 8 bins",
    "within_one_2": "within one of 2 bins",
    "within_one_4": "within one of 4 bins",
    "within_one_8": "within one of 8 bins",
    "coverage90": "inside the 90 % interval",
    "width90": "width of the 90 % interval, tokens",
    "pinball": "pinball loss, tokens",
}
_SHARES = ("accuracy", "within", "coverage")


def score_text(name: str, value: float, half_width: float = math.nan) -> str:
    """A score with its interval ("84.2 ± 1.1 %")."""
    if not math.isfinite(value):
        return UNKNOWN
    if name.startswith(_SHARES):
        middle, half = rounded(100 * value, 100 * half_width)
        return f"{middle} ± {half} %" if half else f"{middle} %"
    middle, half = rounded(value, half_width)
    return f"{middle} ± {half}" if half else middle


BINS = (2, 4, 8)


def figures(found: Sequence[Evaluation]) -> dict[str, Any]:
    """Curves of each evaluation, and the predicted and true lengths of the first one's requests."""
    first = found[0].shown
    return {
        "names": [one.name for one in found],
        "calibration": [{"x": short(one.calibration[0]), "y": short(one.calibration[1])} for one in found],
        "mae": [_windows(one, lambda w: w.mae.value, lambda w: w.mae.half_width) for one in found],
        "r2": [_windows(one, lambda w: w.r2_all) for one in found],
        "tau": [_windows(one, lambda w: w.tau.value, lambda w: w.tau.half_width) for one in found],
        "bins": [
            {
                "right": short([one.scores[f"accuracy_{k}"].value for k in BINS]),
                "near": short([one.scores[f"within_one_{k}"].value for k in BINS]),
            }
            for one in found
        ],
        "pairs": {key: short(first[key]) for key in ("predicted", "low", "high", "actual")} | {"model": first["model"]},
    }


def _windows(
    one: Evaluation, value: Callable[[Window], float], half: Callable[[Window], float] | None = None
) -> dict[str, Any]:
    return {
        "x": [w.tokens for w in one.windows],
        "y": short([value(w) for w in one.windows]),
        "half": short([half(w) for w in one.windows]) if half else [],
    }


def short(values: Any) -> list[float | None]:
    """Numbers with five digits; what is not finite becomes null, a gap in the curve."""
    return [float(f"{v:.5g}") if math.isfinite(v) else None for v in np.asarray(values, float).tolist()]


CALIBRATION_NOTE = "The share of lengths below each predicted quantile. Honest is the diagonal."
PAIRS_NOTE = "A point a request; the line is right. Hover for the 90 % interval."
WINDOWS_NOTE = (
    "Asked again after every 50 tokens, with the text so far where there is one. Error and order are of the "
    "requests that still run; R2 is of all requests, those that are done counted as known."
)
BINS_NOTE = "Bins of equal mass: the right one (full) and the right one or its neighbour (pale)."
MODELS_NOTE = "The order that matters to a queue is that among requests of one model: tau within it."
NOTES = """<dl class="notes">
<dt>MAE, tau, bins</dt><dd>of the median; RMSE, R2 and bias are of the mean</dd>
<dt>Kendall's tau</dt><dd>share of pairs of requests in the right order less the share in the wrong order</dd>
<dt>Pinball loss</dt><dd>mean over the quantiles from 5 to 95 %; smaller is better, and it judges the whole
distribution</dd>
<dt>Interval</dt><dd>± is the half-width of a 95 % interval of a bootstrap over prompts</dd>
<dt>Cut outputs</dt><dd>have a length that nobody knows: lengths are scored up to a horizon, and those that ended
before it stand for those that were cut before it</dd></dl>"""

_MODEL_COLUMNS = {
    "requests": "requests",
    "tau": "tau",
    "mae": "MAE, tokens",
    "bias": "bias, tokens",
    "coverage90": "inside 90 %",
    "width90": "width of 90 %, tokens",
}


def body(heading: str, found: Sequence[Evaluation], metadata: Mapping[str, Any]) -> str:
    """Everything below the document's head."""
    return "".join(
        [
            header(heading, _metadata(found, metadata)),
            section("Scores", _scores(found)),
            section("Is it honest?", _figure("calibration"), CALIBRATION_NOTE),
            section("Predicted and true", _figure("pairs"), PAIRS_NOTE),
            section(
                "As tokens come", f'<div class="grid">{"".join(map(_plot, ("mae", "tau", "r2")))}</div>', WINDOWS_NOTE
            )
            if len(found[0].windows) > 1
            else "",
            section("Bins", _figure("bins"), BINS_NOTE),
            section("By model", "".join(_models(one, len(found) > 1) for one in found), MODELS_NOTE),
            section("How to read it", NOTES),
        ]
    )


def _metadata(found: Sequence[Evaluation], metadata: Mapping[str, Any]) -> list[str]:
    first = found[0]
    told = [f"{first.requests:,} requests, {first.prompts:,} prompts, {len(first.by_model)} models"]
    if "samples" in metadata:
        told.append(f"learnt from {metadata['samples']:,} samples of {metadata.get('prompts', 0):,} prompts")
    if first.censored:
        told.append(f"{first.censored:,} outputs ({100 * first.cut_share:.3g} %) were cut")
    if first.seen:
        told.append(f"{first.seen:,} of its prompts were learnt from: not a fair test")
    told += [f"{ms:.3f} ms a prompt at batch {n}" for n, ms in first.latency_ms.items()]
    return told


def _plot(name: str) -> str:
    return f'<figure><div class="plot" id="{name}"></div></figure>'


def _figure(name: str) -> str:
    return f'<div class="after">{_plot(name)}</div>'


def _scores(found: Sequence[Evaluation]) -> str:
    heads = "".join(f'<th scope="col">{swatch(i)}{escape(one.name)}</th>' for i, one in enumerate(found))
    lines = "".join(
        f'<tr><th scope="row">{escape(words)}</th>' + "".join(_score(name, one) for one in found) + "</tr>"
        for name, words in WORDS.items()
        if name in found[0].scores
    )
    return scrolling("Scores", f"<thead><tr><td></td>{heads}</tr></thead><tbody>{lines}</tbody>", "scores")


def _score(name: str, one: Evaluation) -> str:
    value, _, half = score_text(name, one.scores[name].value, one.scores[name].half_width).partition(" ± ")
    return f"<td>{value}{f' <span class=half>± {half}</span>' if half else ''}</td>"


def _models(one: Evaluation, named: bool) -> str:
    heads = "".join(f'<th scope="col">{text}</th>' for text in _MODEL_COLUMNS.values())
    lines = "".join(
        f'<tr><th scope="row">{escape(model or "not told")}</th>'
        + "".join(f"<td>{_cell(name, of[name])}</td>" for name in _MODEL_COLUMNS)
        + "</tr>"
        for model, of in one.by_model.items()
    )
    title = f'<h3 class="later">{escape(one.name)}</h3>' if named else ""
    return title + scrolling(f"By model: {one.name}", f"<thead><tr><td></td>{heads}</tr></thead><tbody>{lines}</tbody>")


def _cell(name: str, value: float) -> str:
    return f"{value:,.0f}" if name == "requests" else score_text(name, value)


def write_predict_html(
    path: Path | str,
    found: Sequence[Evaluation],
    metadata: Mapping[str, Any] | None = None,
    *,
    heading: str = "Predicted lengths",
) -> None:
    """A self-contained page of evaluations side by side; the same ones give the same bytes.

    Raises:
        InputError: There is no evaluation, or two share a name.
        MissingExtraError: plotly is not installed.
        OutputError: The file cannot be written.
    """
    if not found or len({one.name for one in found}) < len(found):
        raise InputError("a page needs at least one evaluation, each with a name of its own")
    text = document(
        heading,
        body(heading, found, metadata or {}),
        styles=asset("page.css") + asset("predict/predict.css"),
        scripts=[plotly_js(), asset("look.js"), asset("predict/predict.js")],
        data=json.dumps(figures(found), separators=(",", ":"), allow_nan=False, ensure_ascii=False),
    )
    write_whole(path, text.encode())


VERSION = 1


def predict_json(found: Sequence[Evaluation], metadata: Mapping[str, Any] | None = None) -> str:
    """The text of a JSON file with everything that was scored, under stable keys (see the module)."""
    made = {
        "format": "lengthwise.prediction",
        "version": VERSION,
        "predictor": dict(metadata or {}),
        "evaluations": [_evaluation(one) for one in found],
    }
    return json.dumps(plain(made), indent=2, ensure_ascii=False, allow_nan=False, default=str) + "\n"


def _evaluation(one: Evaluation) -> dict[str, Any]:
    fields = {f.name: getattr(one, f.name) for f in dataclasses.fields(one) if f.name != "shown"}
    level, share = one.calibration
    return {
        **fields,
        "scores": {name: dataclasses.asdict(e) for name, e in one.scores.items()},
        "windows": [dataclasses.asdict(w) for w in one.windows],
        "calibration": {"level": level.tolist(), "share": share.tolist()},
        "latency_ms": {str(n): ms for n, ms in one.latency_ms.items()},
    }
