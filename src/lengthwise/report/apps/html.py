"""One page of an application: what is planned, and what became of it; self-contained, for any screen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from lengthwise.report._document import asset, plotly_js
from lengthwise.report.apps._facts import AppFacts
from lengthwise.report.apps._figures import figures
from lengthwise.report.apps._page import page
from lengthwise.schema.app import AppPlan
from lengthwise.schema.files import write_whole

HERE = "lengthwise.report.apps"


def write_app_html(
    path: Path | str, plan: AppPlan | None, about: AppFacts, models: Sequence[str] | None = None
) -> None:
    """A page of a plan, of a run (``about.manifest``), or of both side by side; it fetches nothing.

    The same plan and facts give the same bytes.

    Args:
        path: Of the page.
        plan: The plan; None: engines were given.
        about: What is said beside it.
        models: Names, where there is no plan.

    Raises:
        MissingExtraError: plotly is not installed.
        OutputError: The file cannot be written.
    """
    plotly = plotly_js()
    names = list(plan.models if plan is not None else models or ())
    text = page(
        plan,
        names,
        about,
        styles=asset("page.css") + asset("apps.css", HERE),
        scripts=[plotly, asset("look.js"), asset("apps.js", HERE)],
        data=json.dumps(figures(plan, names, about), separators=(",", ":"), allow_nan=False),
    )
    write_whole(path, text.encode())
