"""What a user of ``lengthwise ui`` waits for, in Chromium: start, first answer to a move, eight tabs at once.

An answer simulates 1,000 requests at each of eight rates. Times are from the input event to the paint of the answer,
on this machine with its other load (``load_1m``); ``server_cpu_ms`` is the CPU time of an answer, to compare machines.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from _harness import group_use, machine, summary
from _sections import Sections

TABS, LIMIT_S = 8, 300
COMMAND = [sys.executable, "-m", "lengthwise.cli", "ui", "--port", "0"]
MOVES = """
const done = arguments[1], times = [];
(async () => {
  const rate = document.getElementById("rate"), body = document.body.dataset;
  for (let at = 0; at < arguments[0]; at++) {
    const before = Number(body.answers || 0);
    rate.value = 0.5 + Math.random();
    rate.dispatchEvent(new Event("input", { bubbles: true }));
    while (Number(body.answers || 0) === before) await new Promise((resolve) => setTimeout(resolve, 4));
    times.push(Number(body.firstMs));
  }
})().then(() => { window.times = times; if (done) done(times); });
"""


@contextmanager
def served() -> Iterator[tuple[str, float, Any]]:
    """Yield the address of a new planner, the seconds until it serves its page, and its process."""
    start_s = time.perf_counter()
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        assert process.stdout is not None
        found = re.search(r"http://\S+/", process.stdout.readline())
        assert found
        with urllib.request.urlopen(found[0], timeout=LIMIT_S) as page:
            page.read()
        yield found[0], time.perf_counter() - start_s, process
        process.terminate()


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield a headless Chromium. Raises FileNotFoundError without one."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    browser, service = shutil.which("chromium"), shutil.which("chromedriver")
    if not (browser and service):
        raise FileNotFoundError("chromium and chromedriver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options, Service(service))
        driver.set_script_timeout(LIMIT_S)
        yield driver
        driver.quit()


def opened(driver: Any, address: str) -> None:
    """Open the page and wait for its complete answer."""
    driver.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": True})  # else no paint in the background
    driver.get(address)
    end_s = time.monotonic() + LIMIT_S
    while not driver.execute_script("return Number(document.body.dataset.answers || 0) >= 2"):
        assert time.monotonic() < end_s
        time.sleep(0.1)


def figures(_shared: Path, quick: bool) -> dict[str, Any]:
    """Return the figures of the planner."""
    moves, starts_s = 10 if quick else 60, []
    for _ in range(1 if quick else 3):
        with served() as (_, start_s, _):
            starts_s.append(start_s)
    with served() as (address, _, process), chromium() as driver:
        parts = [urllib.request.urlopen(address + path).read() for path in ("", "choices/plan")]
        opened(driver, address)
        before_s = group_use(process.pid)[0]
        first_ms = driver.execute_async_script(MOVES, moves)
        used_ms = 1000 * (group_use(process.pid)[0] - before_s) / moves
        for _ in range(TABS - 1):
            driver.switch_to.new_window("window")
            opened(driver, address)
        for handle in driver.window_handles:
            driver.switch_to.window(handle)
            driver.execute_script("window.times = null;" + MOVES, max(5, moves // 4))
        tabs_ms: list[float] = []
        for handle in driver.window_handles:
            driver.switch_to.window(handle)
            while (times := driver.execute_script("return window.times")) is None:
                time.sleep(0.1)
            tabs_ms += times
    shared = {"machine": machine(), "moves": moves, "server_cpu_ms": used_ms}
    return {
        "ui.first_answer_ms_p50": {"value": float(np.median(first_ms))} | shared,
        "ui.first_answer_ms_p95": {"value": float(np.quantile(first_ms, 0.95))} | shared,
        "ui.concurrent_tabs": {"value": float(np.quantile(tabs_ms, 0.95)) / 1000, "tabs": TABS} | shared,
        "ui.page_kb": {"value": sum(map(len, parts)) / 1000},
        "ui.start_s": summary(starts_s) | {"machine": machine()},
    }


SECTIONS = Sections("ui", __doc__)

if __name__ == "__main__":
    SECTIONS.main()
