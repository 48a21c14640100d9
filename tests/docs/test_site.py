"""The documentation site builds without a warning, its links resolve, its search works from files without a network."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import unquote, urldefrag

import pytest
from browser import until
from documents import ROOT
from selenium.webdriver.common.by import By

pytestmark = [pytest.mark.slow, pytest.mark.browser]


class Page(HTMLParser):
    """The anchors of a page, where its links lead, and what it loads."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.links, self.loaded = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.anchors |= {values.get("id"), values.get("name")}
        self.links += [values["href"]] if "href" in values else []
        self.loaded += [values["src"]] if "src" in values else []
        self.loaded += [values["href"]] if tag == "link" and "href" in values else []


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_links_and_anchors_of_the_site_resolve(site):
    pages = {path: Page(path.read_text("utf-8")) for path in site.rglob("*.html") if path.name != "404.html"}
    broken = []
    for path, page in pages.items():
        for link in {*page.links, *page.loaded}:
            if re.match(r"https?:|data:|mailto:", link):
                broken += [(path.name, link)] if link in page.loaded else []  # nothing comes from another host
                continue
            place, anchor = urldefrag(link)
            target = (path.parent / unquote(place)).resolve() if place else path
            missing = anchor and target in pages and unquote(anchor) not in pages[target].anchors
            broken += [(path.name, link)] if missing or not target.exists() else []
    assert len(pages) > 80
    assert broken == []


def test_the_search_works_from_files(site, driver):
    driver.get((site / "index.html").as_uri())
    driver.execute_script("document.querySelector('[data-md-toggle=search]').click()")
    driver.find_element(By.CSS_SELECTOR, "input.md-search__input").send_keys("model card")
    first = "return document.querySelector('.md-search-result__link')?.href.includes('default-predictor-card.html')"
    until(driver, first, limit_s=60)
