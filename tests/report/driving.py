"""Pages opened in a browser and read as text."""

from __future__ import annotations

import re

from browser import prefer, screen, until

__all__ = ["assert_fetches_nothing", "look", "prefer", "screen", "until", "without_plotly"]


def look(driver, page: str, width: int, scheme: str, plots: int) -> None:
    """Open a page on a screen of this width, and wait until this many plots are drawn."""
    screen(driver, width, scheme)
    driver.get(page)
    until(driver, f"return document.querySelectorAll('.plot .main-svg').length >= {plots}")


def without_plotly(page: str) -> str:
    """Return the page without the compressed library and the its element."""
    return re.sub(r"<script type=\"application/gzip\" id=\"plotly\">.*?</script>", "", page, flags=re.DOTALL)


def assert_fetches_nothing(page: str, most: float) -> None:
    """Assert that a page has one plotly.js, fewer other characters than ``most``, and no address."""
    assert page.count('id="plotly"') == 1
    own = without_plotly(page)
    assert len(own) < most
    assert not re.search(r"https?://", own)
    assert not re.search(r"<(link|script|img|iframe)[^>]*(src|href)=\"(?!data:)", own)
    assert "default-src 'none'" in own
