"""The documents, and what stands in them: fenced blocks and links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "changelog.d").glob("*.md")])
_FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True)
class Block:
    """A fenced block; with a ``title`` it is a file that the reader has to write."""

    language: str
    title: str | None
    runs: bool
    text: str
    line: int


def name(document: Path) -> str:
    """A document as the reader knows it."""
    return document.relative_to(ROOT).as_posix()


def blocks(document: Path) -> list[Block]:
    """The fenced blocks of a document in their order."""
    text = document.read_text(encoding="utf-8")
    return [_block(found, text[: found.start()].count("\n") + 1) for found in _FENCE.finditer(text)]


def _block(found: re.Match[str], line: int) -> Block:
    title = _TITLE.search(found[2])
    return Block(found[1], title[1] if title else None, "no-run" not in found[2], found[3], line)


def prose(document: Path) -> str:
    """A document without its fenced blocks."""
    return _FENCE.sub("", document.read_text(encoding="utf-8"))


def links(document: Path) -> list[str]:
    """Where its links lead."""
    return _LINK.findall(prose(document))


def anchors(document: Path) -> set[str]:
    """The anchors of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
