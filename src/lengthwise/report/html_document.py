"""What every page is: one self-contained document, plotly and all, that fetches nothing."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import import_module
from importlib.resources import files

from lengthwise.report.headline import Cell
from lengthwise.report.result import Result
from lengthwise.schema.errors import MissingExtraError

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"

LOGO = (
    '<svg viewBox="0 0 24 16" aria-hidden="true"><rect width="10" height="3" rx="1.5"/>'
    '<rect y="6.5" width="24" height="3" rx="1.5"/><rect y="13" width="16" height="3" rx="1.5"/></svg>'
)


def document(heading: str, body: str, *, styles: str, scripts: Sequence[str], data: str) -> str:
    """The whole document; ``data`` is the JSON that the scripts read from element "figures"."""
    inline = "\n".join(f"<script>{script}</script>" for script in scripts)
    safe = data.replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(heading)} · lengthwise</title>
<link rel="icon" href="data:,">
<style>
{styles}</style>
</head>
<body>
<main>
{body}</main>
<noscript><p class="plain">The figures need JavaScript; the numbers do not.</p></noscript>
<script type="application/json" id="figures">{safe}</script>
{inline}
</body>
</html>
"""


def header(heading: str, metadata: Sequence[str]) -> str:
    """The page's head: the question and what is fixed."""
    items = "".join(f"<li>{escape(fact)}</li>" for fact in metadata)
    return (
        f'<header><p class="brand">{LOGO}lengthwise</p><h1>{escape(heading)}</h1>'
        f'<ul class="facts">{items}</ul></header>\n'
    )


def section(title: str, body: str, note: str = "") -> str:
    """A section; its title and body are HTML, its note is text."""
    lead = f'<p class="muted">{escape(note)}</p>' if note else ""
    return f"<section><h2>{title}</h2>{lead}{body}</section>\n"


def plotly_js() -> str:
    """Plotly's script, to be put into a page.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    try:
        offline = import_module("plotly.offline")
    except ImportError as error:
        raise MissingExtraError("the HTML report", "report") from error
    script: str = offline.get_plotlyjs()
    return script.replace("</script", "<\\/script")


def asset(name: str) -> str:
    """The text of a file in a package's ``_assets``."""
    return files("lengthwise.report").joinpath("_assets", name).read_text(encoding="utf-8")


SERIES = 8
"""Colours of variants; beyond so many they come again with another dash."""


def swatch(index: int) -> str:
    """A variant's colour."""
    return f'<i class="swatch" style="--c:var(--series-{index % SERIES})"></i>'


def variant_heads(results: Sequence[Result], skip: int = 0) -> str:
    """The head of a table with a column a variant, all but the first ``skip``."""
    shown = list(enumerate(results))[skip:]
    heads = "".join(f'<th scope="col">{swatch(i)}{escape(r.name)}</th>' for i, r in shown)
    return f"<thead><tr><td></td>{heads}</tr></thead>"


def scrolling(label: str, table: str, kind: str = "") -> str:
    """A table that scrolls inside its box where it is wider than the screen, by keyboard too."""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">'
        f'<table class="{kind}">{table}</table></div>'
    )


def interval(cell: Cell) -> str:
    """The intervals behind a value, of chance and of the cost model; nothing where they are not known."""
    half = f' <span class="half">{cell.interval}</span>' if cell.interval else ""
    return half + (f' <span class="half model">{cell.model}</span>' if cell.model else "")
