"""Hooks of mkdocs.yml: what the pages link to outside of docs/ becomes a part of the site.

Markdown files become pages under project/, notebooks and pictures are copied, other files are shown as text.
"""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FENCES = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
GENERATED = re.compile(r"<!-- (?:\[\[\[|generated|end).*?-->\n", re.DOTALL)  # marks of generated parts
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
COPIED = {".ipynb", ".png", ".svg"}
SHOWN = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="color-scheme" content="light dark">
<title>{name}</title><body style="margin: 1rem"><h1 style="font: bold 1.2rem system-ui">{name}</h1>
<pre style="overflow-x: auto">{text}</pre></html>"""


def links(markdown: str) -> set[str]:
    """Return the relative targets of a page's links, without anchors."""
    return {found[2] for part in FENCES.split(markdown)[::2] for found in LINK.finditer(part)}


def site_path(path: Path) -> str:
    """Return where a file of the repository is among the pages of the site."""
    if path.is_dir():
        path /= "README.md"
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    ending = "" if path.suffix in {".md", *COPIED} else ".html"
    return f"project/{path.relative_to(ROOT).as_posix()}{ending}"


def shown(path: Path) -> str:
    """Return a text file as a page of its own, which the search does not cover."""
    name = path.relative_to(ROOT).as_posix()
    return SHOWN.format(name=html.escape(name), text=html.escape(path.read_text("utf-8")))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what pages link to outside of docs/, and what those pages link to."""
    pages = [*DOCS.rglob("*.md"), *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"))]
    pages += [ROOT / "deploy" / "README.md"]
    while pages:
        page = pages.pop()
        if not page.is_relative_to(DOCS) and not files.get_file_from_path(site_path(page)):
            files.append(File.generated(config, site_path(page), abs_src_path=str(page)))
        for link in links(page.read_text("utf-8")):
            path = (page.parent / link).resolve()
            if path.is_dir():
                path /= "README.md"
            if not path.is_file() or path.is_relative_to(DOCS) or files.get_file_from_path(site_path(path)):
                continue  # of a link that leads nowhere, strict mode warns
            if path.suffix == ".md":
                pages.append(path)
            elif path.suffix in COPIED:
                files.append(File.generated(config, site_path(path), abs_src_path=str(path)))
            else:
                files.append(File.generated(config, site_path(path), content=shown(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Point links at the places of their targets on the site, and leave out marks for tests and generators."""
    source = page.file.abs_src_path or page.file.src_uri
    here, depth = Path(source), page.file.src_uri.count("/")

    def moved(found: re.Match[str]) -> str:
        target = (here.parent / found[2]).resolve()
        return f"{found[1]}{'../' * depth}{site_path(target)}{found[3]}" if target.exists() else found[0]

    parts = FENCES.split(GENERATED.sub("\n", markdown))
    return "".join(p.replace(" no-run", "", 1) if i % 2 else LINK.sub(moved, p) for i, p in enumerate(parts))


class Built(HTMLParser):
    """The anchors of a built page, where its links lead, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str | None] = set()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Read one tag."""
        values = dict(attrs)
        self.anchors |= {values.get("id"), values.get("name")}
        found = {one for name in ("href", "src") if (one := values.get(name)) is not None}
        self.links |= found
        self.loaded |= found if tag == "link" or "src" in values else set()


def broken_links(site: Path) -> tuple[int, list[tuple[str, str]]]:
    """Return the number of pages of a built site, and (page, link) of links that lead nowhere.

    Links to other hosts count only where a page loads them, since the site works without a network.
    """
    pages = {path: Built(path.read_text("utf-8")) for path in site.rglob("*.html") if path.name != "404.html"}
    broken = []
    for path, page in pages.items():
        for link in sorted(page.links):
            if re.match(r"https?:|data:|mailto:", link):
                broken += [(path.name, link)] if link in page.loaded and not link.startswith("data:") else []
                continue
            place, anchor = urldefrag(link)
            target = (path.parent / unquote(place)).resolve() if place else path
            missing = anchor and target in pages and unquote(anchor) not in pages[target].anchors
            broken += [(path.name, link)] if missing or not target.exists() else []
    return len(pages), broken
