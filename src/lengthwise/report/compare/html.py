"""One page on how far a run is off another: self-contained, for screens of any width and paper."""

from __future__ import annotations

import json
from pathlib import Path

from lengthwise.metrics import Comparison
from lengthwise.report._document import asset, plotly_js
from lengthwise.report.compare._data import figures
from lengthwise.report.compare._page import page
from lengthwise.schema.files import write_whole
from lengthwise.schema.measured import Measured

HERE = "lengthwise.report.compare"


def write_compare_html(path: Path | str, comparison: Comparison, a: Measured, b: Measured) -> None:
    """A self-contained page: doubts, errors with intervals, distributions, both runs over time.

    Nothing is fetched when it is opened (a content security policy sees to that), and the same runs give
    the same bytes.

    Raises:
        MissingExtraError: plotly is not installed.
        OutputError: The file cannot be written.
    """
    plotly = plotly_js()
    drawn = figures(comparison, a, b)
    data = json.dumps([f for some in drawn.values() for f in some], separators=(",", ":"), allow_nan=False)
    text = page(
        comparison,
        sections={name: [f["id"] for f in some] for name, some in drawn.items()},
        styles=asset("page.css") + asset("compare.css", HERE),
        scripts=[plotly, asset("look.js"), asset("compare.js", HERE)],
        data=data,
    )
    write_whole(path, text.encode())
