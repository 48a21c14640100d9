"""A headless Chromium for the tests of pages, and how it is made to look at one."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

LIMIT_S = 20.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Headless Chromium that keeps its logs."""
    browser, service = _programs()
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    made = webdriver.Chrome(options, Service(service))
    # Without it a page of one of several browsers gets no focus events under load.
    made.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": True})
    yield made
    made.quit()


def _programs() -> tuple[str, str]:
    """Browser and driver; without them the test is skipped, in CI it fails."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    service = shutil.which("chromedriver")
    if browser and service:
        return browser, service
    message = "chromium and chromedriver are not installed (Debian: chromium, chromium-driver)"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


def screen(driver: Any, width: int, scheme: str) -> None:
    """A screen so wide, light or dark."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    prefer(driver, scheme)


def prefer(driver: Any, scheme: str) -> None:
    """Light or dark."""
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)


def until(driver: Any, script: str, limit_s: float = LIMIT_S) -> None:
    """Waits until a script of the page returns true."""
    end = time.monotonic() + limit_s
    while not driver.execute_script(script):
        assert time.monotonic() < end, f"never came: {script}"
        time.sleep(0.05)
