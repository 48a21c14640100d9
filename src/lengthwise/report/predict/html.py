"""One page about a predictor: is it honest, how wrong is it, and does it learn as tokens come."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lengthwise.predict.evaluate import Evaluation
from lengthwise.report._document import asset, document, plotly_js
from lengthwise.report.predict._data import figures
from lengthwise.report.predict._page import body
from lengthwise.schema.errors import InputError
from lengthwise.schema.files import write_whole


def write_predict_html(
    path: Path | str,
    found: Sequence[Evaluation],
    facts: Mapping[str, Any] | None = None,
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
        body(heading, found, facts or {}),
        styles=asset("page.css") + asset("predict.css", "lengthwise.report.predict"),
        scripts=[plotly_js(), asset("look.js"), asset("predict.js", "lengthwise.report.predict")],
        data=json.dumps(figures(found), separators=(",", ":"), allow_nan=False, ensure_ascii=False),
    )
    write_whole(path, text.encode())
