"""One self-contained page: theory over simulation."""

from __future__ import annotations

import json
from pathlib import Path

from lengthwise.report._document import asset, plotly_js
from lengthwise.report.theory._figures import figures
from lengthwise.report.theory._page import page
from lengthwise.schema.files import write_whole
from lengthwise.theory import MultiBinStudy, QueueStudy


def write_theory_html(path: Path | str, study: MultiBinStudy | QueueStudy) -> None:
    """A page that answers, draws and lists a study; it fetches nothing, and the same study gives the same bytes.

    Raises:
        MissingExtraError: plotly is not installed.
        OutputError: The file cannot be written.
    """
    plotly = plotly_js()
    drawn = figures(study)
    text = page(
        study,
        [figure["id"] for figure in drawn],
        styles=asset("page.css"),
        scripts=[plotly, asset("look.js"), asset("theory.js", "lengthwise.report.theory")],
        data=json.dumps(drawn, separators=(",", ":"), allow_nan=False),
    )
    write_whole(path, text.encode())
