"""The page's HTML, section by section. Everything that users named is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from lengthwise.predict.evaluate import Evaluation
from lengthwise.report._document import header, section
from lengthwise.report._marks import scrolling, swatch
from lengthwise.report.predict._words import WORDS, score_text

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


def body(heading: str, found: Sequence[Evaluation], facts: Mapping[str, Any]) -> str:
    """Everything below the document's head."""
    return "".join(
        [
            header(heading, _facts(found, facts)),
            section("Scores", _scores(found)),
            section("Is it honest?", _figure("calibration"), CALIBRATION_NOTE),
            section("Predicted and true", _figure("pairs"), PAIRS_NOTE),
            section(
                "As tokens come",
                f'<div class="grid">{"".join(map(_plot, ("mae", "tau", "r2")))}</div>',
                WINDOWS_NOTE,
            )
            if len(found[0].windows) > 1
            else "",
            section("Bins", _figure("bins"), BINS_NOTE),
            section("By model", "".join(_models(one, len(found) > 1) for one in found), MODELS_NOTE),
            section("How to read it", NOTES),
        ]
    )


def _facts(found: Sequence[Evaluation], facts: Mapping[str, Any]) -> list[str]:
    first = found[0]
    told = [f"{first.requests:,} requests, {first.prompts:,} prompts, {len(first.by_model)} models"]
    if "samples" in facts:
        told.append(f"learnt from {facts['samples']:,} samples of {facts.get('prompts', 0):,} prompts")
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
    return title + scrolling(
        f"By model: {one.name}", f"<thead><tr><td></td>{heads}</tr></thead><tbody>{lines}</tbody>"
    )


def _cell(name: str, value: float) -> str:
    return f"{value:,.0f}" if name == "requests" else score_text(name, value)
