"""One page that answers whether length-aware scheduling is worth it: self-contained, for any screen."""

from __future__ import annotations

import json
from pathlib import Path

from lengthwise.report._document import asset, plotly_js
from lengthwise.report.lab._data import lab_data
from lengthwise.report.lab._page import page
from lengthwise.report.lab._words import check_table
from lengthwise.schema.files import write_whole
from lengthwise.schema.lab import LabTable

HERE = "lengthwise.report.lab"


def write_lab_html(path: Path | str, table: LabTable) -> None:
    """A self-contained page: the answer, gap closed against the tail, by load and batch, all numbers.

    Nothing is fetched when it is opened (a content security policy sees to that), and the same table
    gives the same bytes.

    Raises:
        InputError: There is no cell.
        MissingExtraError: plotly is not installed.
        OutputError: The file cannot be written.
    """
    check_table(table)
    plotly = plotly_js()
    data = json.dumps(lab_data(table), separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    text = page(
        table,
        styles=asset("page.css") + asset("lab.css", HERE),
        scripts=[plotly, asset("look.js"), asset("lab.js", HERE)],
        data=data,
    )
    write_whole(path, text.encode())
