"""How a browser is made to look at a page, and pages are read as text."""

from __future__ import annotations

import re

from browser import prefer, screen, until

__all__ = ["assert_fetches_nothing", "look", "prefer", "screen", "until", "without_plotly"]


def look(driver, page: str, width: int, scheme: str, plots: int) -> None:
    """Opens a page on a screen so wide, and waits until so many plots are drawn."""
    screen(driver, width, scheme)
    driver.get(page)
    until(driver, f"return document.querySelectorAll('.plot .main-svg').length >= {plots}")


def without_plotly(page: str) -> str:
    return re.sub(r"<script>/\*\*\n\* plotly\.js.*?</script>", "", page, flags=re.DOTALL)


def assert_fetches_nothing(page: str, most: float) -> None:
    """One plotly within, and beside it fewer characters than ``most`` and no address of anywhere."""
    assert page.count("plotly.js v") == 1
    ours = without_plotly(page)
    assert len(ours) < most
    assert not re.search(r"https?://", ours)
    assert not re.search(r"<(link|script|img|iframe)[^>]*(src|href)=\"(?!data:)", ours)
    assert "default-src 'none'" in ours
