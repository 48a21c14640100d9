"""Scores of predictors on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from lengthwise.cli._predict_notes import seen_lines
from lengthwise.cli._show import print_facts, print_table
from lengthwise.predict.evaluate import Evaluation
from lengthwise.report.predict import WORDS, score_text

CARD = (
    "mae",
    "rmse",
    "r2",
    "tau",
    "tau_within",
    "accuracy_4",
    "within_one_4",
    "coverage90",
    "width90",
    "pinball",
)


def print_scores(found: Sequence[Evaluation], title: str) -> None:
    """Prints a table of scores, a column a predictor, and one by tokens so far."""
    for one in found:
        left = [f"{one.censored:,} outputs ({100 * one.cut_share:.3g} %) were cut"] if one.censored else []
        speed = [", ".join(f"{ms:.3f} ms a prompt at batch {n}" for n, ms in one.latency_ms.items())]
        told = [f"{one.requests:,} requests, {one.prompts:,} prompts", *left, *[s for s in speed if s]]
        print_facts(title if one is found[0] else "", [(one.name, "; ".join(told))])
        for line in seen_lines(one):
            typer.echo(line)
    names = [name for name in CARD if any(name in one.scores for one in found)]
    columns = ("score", *(one.name if len(found) > 1 else "value" for one in found))
    rows = [
        [
            WORDS[name],
            *(score_text(name, one.scores[name].value, one.scores[name].half_width) for one in found),
        ]
        for name in names
    ]
    print_table(columns, rows, wraps=())
    windows = found[0].windows
    if len(windows) > 1:
        typer.echo("")
        print_table(
            ("tokens so far", "still running", "MAE", "R2", "tau", "90 % cover", "R2 of all"),
            [
                [f"{w.tokens:,}", f"{w.running:,}", f"{w.mae.value:,.0f}", f"{w.r2.value:.2f}", f"{w.tau.value:.2f}",
                 f"{100 * w.coverage90.value:.0f} %", f"{w.r2_all:.2f}"]
                for w in windows
            ],
        )  # fmt: skip
