"""One page about a profile: times over sizes, how near they come to the data sheet, where nothing was measured."""

from __future__ import annotations

import json
from pathlib import Path

from lengthwise.cost.profiles import ProfileView
from lengthwise.report._document import asset, document, plotly_js
from lengthwise.report.profile._data import figures
from lengthwise.report.profile._page import body
from lengthwise.schema.files import write_whole


def write_profile_html(path: Path | str, view: ProfileView, *, heading: str = "") -> None:
    """A self-contained page of a profile; the same one gives the same bytes.

    Raises:
        MissingExtraError: plotly is not installed.
        OutputError: The file cannot be written.
    """
    heading, drawn = heading or view.profile.facts.name or "A profile", figures(view)
    text = document(
        heading,
        body(heading, view, drawn),
        styles=asset("page.css") + asset("profile.css", "lengthwise.report.profile"),
        scripts=[plotly_js(), asset("look.js"), asset("profile.js", "lengthwise.report.profile")],
        data=json.dumps(drawn, separators=(",", ":"), allow_nan=False, ensure_ascii=False),
    )
    write_whole(path, text.encode())
