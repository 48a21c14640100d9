"""One page that explains a comparison: self-contained, for screens of any width and paper."""

from __future__ import annotations

import json
from pathlib import Path

from lengthwise.report._document import asset, plotly_js
from lengthwise.report._figures import figures
from lengthwise.report._page import page
from lengthwise.report.result import Result, check_results
from lengthwise.schema.files import write_whole


def write_html(path: Path | str, results: list[Result]) -> None:
    """A self-contained page of all variants: numbers, latencies, what happened over time, what binds.

    Nothing is fetched when it is opened (a content security policy sees to that), and the same
    results give the same bytes.

    Raises:
        InputError: There is no result, or two share a name.
        MissingExtraError: plotly is not installed.
        OutputError: The file cannot be written.
    """
    check_results(results)
    plotly = plotly_js()
    drawn = figures(results)
    data = json.dumps(
        [f for section in drawn.values() for f in section], separators=(",", ":"), allow_nan=False
    )
    text = page(
        results,
        sections={name: [f["id"] for f in section] for name, section in drawn.items()},
        styles=asset("page.css"),
        scripts=[plotly, asset("look.js"), asset("page.js")],
        data=data,
    )
    write_whole(path, text.encode())
