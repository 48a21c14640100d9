"""One page that answers which deployment to buy: self-contained, for screens of any width and paper."""

from __future__ import annotations

import json
from pathlib import Path

from lengthwise.report._document import asset, plotly_js
from lengthwise.report.search._data import study_data
from lengthwise.report.search._page import page
from lengthwise.report.search._standings import check_study
from lengthwise.schema.files import write_whole
from lengthwise.schema.plan import Study

SCRIPTS = ("study.js", "scatter.js", "compare.js", "heat.js", "shifts.js", "listing.js")


def write_search_html(path: Path | str, study: Study) -> None:
    """A self-contained page: the answer and why, cost against latency, and every configuration.

    Limits can be moved on it: the best configuration is then found again among the loads that were
    simulated. Nothing is fetched when it is opened (a content security policy sees to that), and the
    same study gives the same bytes.

    Raises:
        InputError: There is no plan, or two share a name.
        MissingExtraError: plotly is not installed.
        OutputError: The file cannot be written.
    """
    check_study(study)
    plotly = plotly_js()
    data = json.dumps(study_data(study), separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    ours = [asset(name, "lengthwise.report.search") for name in SCRIPTS]
    text = page(
        study,
        styles=asset("page.css") + asset("search.css", "lengthwise.report.search"),
        scripts=[plotly, asset("look.js"), *ours],
        data=data,
    )
    write_whole(path, text.encode())
