"""HTML pages: a Jinja2 template and its data become one self-contained document without external files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lengthwise.schema.errors import MissingExtraError
from lengthwise.schema.files import write_atomic

if TYPE_CHECKING:
    from jinja2 import Environment


@dataclass(frozen=True)
class TableCell:
    """A table cell whose parts the template styles separately."""

    text: str
    interval: str = ""
    model: str = ""
    unit: str = ""
    css: str = ""
    sort: str | None = None


Row = Sequence[str | TableCell]  # a row of a table; the first cell is its label


def write_page(path: Path | str, template: str, *, data: Any, **context: Any) -> None:
    """Render a template to an HTML file. Equal arguments give equal bytes.

    ``template`` is a file in ``_templates`` without its ending, and ``context`` has its variables. The base layout
    needs ``heading`` and ``metadata``. The page's scripts draw ``data`` (JSON without NaN). A content security policy
    forbids the page to fetch anything.

    Raises:
        MissingExtraError: jinja2 is not installed.
        OutputError: The file cannot be written.
    """
    try:
        from markupsafe import Markup

        environment = _environment()
    except ImportError as error:
        raise MissingExtraError("the HTML report", "report") from error
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    # A "<" in a name could close the script element that holds the data.
    context["figures"] = Markup(text.replace("<", "\\u003c"))  # noqa: S704
    write_atomic(path, environment.get_template(f"{template}.html").render(context).encode())


@cache
def _environment() -> Environment:
    import jinja2
    from markupsafe import Markup

    made = jinja2.Environment(
        loader=jinja2.PackageLoader("lengthwise.report", "_templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals |= {"asset": lambda name: Markup(asset(name)), "plotly": packed_plotly, "terms": terms}  # noqa: S704
    return made


def asset(name: str) -> str:
    """Return the text of a file in ``_assets``."""
    return files("lengthwise.report").joinpath("_assets", name).read_text(encoding="utf-8")


@cache
def packed_plotly() -> str:
    """Return plotly.js compressed with gzip and encoded in base64 (0.5 MB instead of 1.2 MB)."""
    import base64
    import gzip

    return base64.b64encode(gzip.compress(asset("plotly-basic.min.js").encode(), mtime=0)).decode()


def terms(*names: str) -> list[tuple[str, str]]:
    """Return (term, definition) for keys of ``_assets/terms.toml``. The term is the key without a part in brackets."""
    import tomllib

    known = tomllib.loads(asset("terms.toml"))
    return [(name.partition(" (")[0], known[name]) for name in names]
