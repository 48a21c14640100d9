"""One page that says which schedule, and shows why: self-contained, for any screen."""

from __future__ import annotations

import json
from pathlib import Path

from lengthwise.report._document import asset, plotly_js
from lengthwise.report.schedule._figures import figures
from lengthwise.report.schedule._page import page
from lengthwise.schema.files import write_whole
from lengthwise.schema.schedule import SchedulePlan

HERE = "lengthwise.report.schedule"


def write_schedule_html(path: Path | str, plan: SchedulePlan) -> None:
    """A page of a choice: the answer, frontier, timeline, runner-ups, drift; it fetches nothing.

    The same plan gives the same bytes.

    Raises:
        MissingExtraError: plotly is not installed.
        OutputError: The file cannot be written.
    """
    plotly = plotly_js()
    text = page(
        plan,
        styles=asset("page.css") + ".plot.tall { height: 420px; }\n",
        scripts=[plotly, asset("look.js"), asset("schedule.js", HERE)],
        data=json.dumps(figures(plan), separators=(",", ":"), allow_nan=False),
    )
    write_whole(path, text.encode())
