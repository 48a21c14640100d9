"""One page that explains a comparison: self-contained, for screens of any width and paper."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.resources import files
from pathlib import Path

from lengthwise.report._figures import figures
from lengthwise.report._page import page
from lengthwise.report.result import Result, check_results
from lengthwise.schema.errors import MissingExtraError
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
    plotly = _plotly_js()
    drawn = figures(results)
    data = json.dumps(
        [f for section in drawn.values() for f in section], separators=(",", ":"), allow_nan=False
    )
    text = page(
        results,
        sections={name: [f["id"] for f in section] for name, section in drawn.items()},
        styles=_asset("page.css"),
        scripts=[plotly, _asset("page.js")],
        data=data.replace("<", "\\u003c"),
    )
    write_whole(path, text.encode())


def _plotly_js() -> str:
    try:
        offline = import_module("plotly.offline")
    except ImportError as error:
        raise MissingExtraError("the HTML report", "report") from error
    script: str = offline.get_plotlyjs()
    return script.replace("</script", "<\\/script")


def _asset(name: str) -> str:
    return files("lengthwise.report").joinpath("_assets", name).read_text(encoding="utf-8")
