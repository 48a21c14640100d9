"""Make the pictures of reports and of the planner in docs/images: python tools/screenshots.py [NAME ...].

Each picture is a report of an example, or the planner, in headless Chromium. Without names, all are made (minutes).
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
REPORTS = {
    "search-report": "search examples/buy-70b.toml",
    "simulate-report": "simulate examples/chat-70b.toml",
    "memory-by-length": "simulate examples/memory-by-length.toml",
    "schedule-report": "schedule examples/schedule-70b-5s.toml",
    "app-report": "app plan examples/apps/ensemble.toml --node 8xA100-80GB@pairs",
    "lab-report": "lab examples/lab-chat.toml",
}
"""By picture: the command whose report it shows."""
WIDTH, HEIGHT = 1200, 800
STEADY_S = 3.0  # a report is drawn when its pixels do not change for so long
PLANNER_STEADY_S = 15.0  # the planner, whose intervals follow its first answer
PROGRAM = [sys.executable, "-m", "lengthwise.cli"]


def chromium() -> webdriver.Chrome:
    """Return a headless browser with a light page of WIDTH times HEIGHT."""
    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    made = webdriver.Chrome(options, Service("/usr/bin/chromedriver"))
    size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    made.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    return made


def write(driver: webdriver.Chrome, url: str, name: str, steady_s: float = STEADY_S) -> None:
    """Write the top of a page, once it has not changed for ``steady_s``, as a picture of 256 colors."""
    driver.get(url)
    shown, since = b"", time.monotonic()
    while time.monotonic() < since + steady_s:
        if (now := driver.get_screenshot_as_png()) != shown:
            shown, since = now, time.monotonic()
        time.sleep(0.2)
    Image.open(io.BytesIO(shown)).convert("RGB").quantize(256).save(IMAGES / f"{name}.png", optimize=True)
    print(IMAGES / f"{name}.png")


def main(names: list[str]) -> None:
    """Write the named pictures, by default all."""
    driver = chromium()
    with tempfile.TemporaryDirectory() as folder:
        for name in names or [*REPORTS, "planner"]:
            if name != "planner":
                report = Path(folder) / f"{name}.html"
                subprocess.run([*PROGRAM, *REPORTS[name].split(), "--report", report, "-q"], cwd=ROOT, check=True)
                write(driver, report.as_uri(), name)
                continue
            with subprocess.Popen([*PROGRAM, "ui", "--port", "0"], stdout=subprocess.PIPE, text=True) as server:
                assert server.stdout is not None
                found = re.search(r"http://\S+", server.stdout.readline())
                assert found is not None
                write(driver, found[0], name, PLANNER_STEADY_S)
                server.terminate()
    driver.quit()


if __name__ == "__main__":
    main(sys.argv[1:])
