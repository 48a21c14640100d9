"""The documentation site builds without a warning, its links resolve, its search works from files without a network."""

from __future__ import annotations

import runpy
import subprocess
import sys

import pytest
from browser import until
from documents import ROOT
from selenium.webdriver.common.by import By

pytestmark = [pytest.mark.slow, pytest.mark.browser]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_links_and_anchors_of_the_site_resolve(site):
    pages, broken = runpy.run_path(str(ROOT / "tools/site.py"))["broken_links"](site)
    assert pages > 80
    assert broken == []


def test_the_search_works_from_files(site, driver):
    driver.get((site / "index.html").as_uri())
    driver.execute_script("document.querySelector('[data-md-toggle=search]').click()")
    driver.find_element(By.CSS_SELECTOR, "input.md-search__input").send_keys("model card")
    first = "return document.querySelector('.md-search-result__link')?.href.includes('default-predictor-card.html')"
    until(driver, first, limit_s=60)
