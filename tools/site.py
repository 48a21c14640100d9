"""Hooks of mkdocs.yml: what the pages link to outside of docs/ becomes a part of the site.

Markdown files become pages under project/, notebooks and pictures are copied, other files are shown as text.
"""

from __future__ import annotations

import html
import re
from pathlib import Path

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
