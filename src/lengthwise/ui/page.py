"""A page of the planner: its parts of HTML, style and script in one frame, its answers, its jobs and their files."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from lengthwise.ui.work import Task

Values = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """The result of a job: what the browser gets as JSON, and what the files of the job are made from."""

    answer: dict[str, Any]
    source: Any = None


@dataclass(frozen=True)
class Download:
    """A file for the browser."""

    name: str
    media_type: str
    content: bytes


@dataclass(frozen=True)
class Page:
    """One page; its assets are NAME.html and NAME.js, and NAME.css if it has a style of its own.

    Attributes:
        name: The name in its address.
        title: The name in the navigation.
        choices: What its lists offer, and the defaults of its fields.
        answers: Short functions by name, from the fields and the task to JSON. A field ``complete`` marks the slower
            answer, with intervals. The newest request of a tab cancels its older ones.
        jobs: Long functions by name; they report progress to the task.
        downloads: Functions by name, from the outcome of a job and the fields to a file.
    """

    name: str
    title: str
    choices: Callable[[], dict[str, Any]] = dict
    answers: Mapping[str, Callable[[Values, Task], dict[str, Any]]] = field(default_factory=dict)
    jobs: Mapping[str, Callable[[Values, Task], Outcome]] = field(default_factory=dict)
    downloads: Mapping[str, Callable[[Outcome, Values], Download]] = field(default_factory=dict)


def html(page: Page, pages: Sequence[Page]) -> tuple[str, str]:
    """Return a page as HTML, and a content security policy that allows only its own style and script."""
    return _html(page.name, page.title, tuple((one.name, one.title) for one in pages))


def security_policy(style: str, script: str) -> str:
    """Return a content security policy that allows one style and one script."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    return (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def asset(name: str, package: str = "lengthwise.ui") -> str:
    """Return the text of an asset, or "" if there is no such file."""
    place = files(package).joinpath("_assets", name)
    return place.read_text(encoding="utf-8") if place.is_file() else ""


@cache
def _html(name: str, title: str, pages: tuple[tuple[str, str], ...]) -> tuple[str, str]:
    style = asset("page.css", "lengthwise.report") + asset("frame.css") + asset(f"{name}.css")
    script = asset("frame.js") + asset(f"{name}.js")
    links = "".join(
        f'<li><a href="{"./" if at == 0 else other}"{" aria-current=page" * (other == name)}>{label}</a></li>'
        for at, (other, label) in enumerate(pages)
    )
    main = asset(f"{name}.html").replace("<!--same-->", asset("same.html"))
    parts = {"<!--title-->": title, "<!--links-->": links, "<!--main-->": main}
    text = asset("frame.html")
    for mark, part in {**parts, "/*style*/": style, "/*script*/": script}.items():
        text = text.replace(mark, part)
    return text, security_policy(style, script)
