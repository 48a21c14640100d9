"""A page of the planner: its parts of HTML, style and script in one frame, its answers, its jobs and their files."""

from __future__ import annotations

import atexit
import base64
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from lengthwise import catalog, workload
from lengthwise.config.files import also_allow
from lengthwise.schema.errors import InputError, UnknownNameError
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


# Fields: what a browser sends is checked before a scenario is made of it, because texts of scenarios name files.
def fields_of(values: Values, defaults: Values) -> Values:
    """Return the fields with their defaults. Raises InputError for a field that the page does not have."""
    if unknown := sorted(set(values) - set(defaults)):
        raise UnknownNameError("field", unknown[0], defaults)
    return defaults | values


def require_name(kind: str, value: Any, known: Sequence[str] | Mapping[str, Any]) -> str:
    """Return a name. Raises InputError if it is not a known one."""
    if not isinstance(value, str) or value not in known:
        raise UnknownNameError(kind, str(value), known)
    return value


def require_model(value: Any, dtype: Any = "") -> str:
    """Return the name of a model of the catalog, with a dtype of weights if it is given: llama-3.1-70b-fp8."""
    suffix = "-" + require_name("dtype", dtype, ("fp8", "int8", "int4", "fp4")) if dtype else ""
    return require_name("model", value, catalog.models()) + suffix


def require_workload(value: Any) -> str:
    """Return a preset, or PROMPT/OUTPUT tokens."""
    if isinstance(value, str) and re.fullmatch(r"\d{1,7}/\d{1,7}", value):
        return value
    return require_name("workload", value, list(workload.presets()))


def require_number(name: str, value: Any, most: float = 1e6) -> float:
    """Return a number above 0, unchanged."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        raise InputError(f"{name} must be a number above 0 and at most {most:,.0f}; it is {value!r}")
    return value


def require_time(name: str, value: Any) -> str:
    """Return a time such as "500ms"."""
    if not re.fullmatch(r"\d+(\.\d+)?(ms|s)", str(value)):
        raise InputError(f'{name} must be a time such as "500ms" or "2s"; it is {value!r}')
    return str(value)


@contextmanager
def priced_gpus(prices_usd: Mapping[str, float]) -> Iterator[dict[str, Path]]:
    """Yield, by name of a GPU, a file that changes its price per hour. The files are deleted at the end."""
    also_allow(_folder())
    with tempfile.TemporaryDirectory(dir=_folder()) as place:
        made = {name: Path(place) / f"{name}.toml" for name in prices_usd}
        for name, path in made.items():
            path.write_text(f"[{json.dumps(name)}]\nprice_per_hour_usd = {prices_usd[name]:.15g}\n", "utf-8")
        yield made


@cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="lengthwise-ui-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def html(page: Page, pages: Sequence[Page]) -> tuple[str, str]:
    """Return a page as HTML, and a content security policy that allows only its own style and script."""
    main, script = asset(f"{page.name}.html"), asset("frame.js")
    if "<!--trace-->" in main:
        script += asset("trace.js")
    for part in ("same", "trace"):
        main = main.replace(f"<!--{part}-->", asset(f"{part}.html"))
    return framed(page.name, page.title, pages, main, script + asset(f"{page.name}.js"))


def security_policy(style: str, script: str) -> str:
    """Return a content security policy that allows one style and one script."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    return (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


@cache
def asset(name: str, package: str = "lengthwise.ui") -> str:
    """Return the text of an asset, or "" if there is no such file."""
    place = files(package).joinpath("_assets", name)
    return place.read_text(encoding="utf-8") if place.is_file() else ""


def framed(name: str, title: str, pages: Sequence[Page], main: str, script: str = "", up: str = "") -> tuple[str, str]:
    """Return ``main`` in the frame of all pages, and its content security policy.

    Args:
        name: The page's name, for its style and its mark in the navigation.
        title: The title of the browser's tab.
        pages: The pages of the navigation; the first is at /.
        main: HTML.
        script: The page's script.
        up: The way from the address to /, for the links: "../" for each folder.
    """
    style = asset("page.css", "lengthwise.report") + asset("frame.css") + asset(f"{name}.css")
    known = [("./" if at == 0 else one.name, one.name, one.title) for at, one in enumerate(pages)]
    links = "".join(
        f'<li{" class=last" * (other == "api")}><a href="{up}{place}"{" aria-current=page" * (other == name)}>{label}'
        "</a></li>"
        for place, other, label in [*known, ("api", "api", "API")]
    )
    text = asset("frame.html")
    parts = {"<!--title-->": title, "<!--links-->": links, "<!--main-->": main}
    for mark, part in {**parts, "/*style*/": style, "/*script*/": script}.items():
        text = text.replace(mark, part)
    return text, security_policy(style, script)
