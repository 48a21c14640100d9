"""The table, page and file of a comparison, and that the page draws."""

from __future__ import annotations

import io
import json
import math
import time
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from lengthwise.metrics import Slo, compare
from lengthwise.report import compare_table, write_compare_html, write_compare_json
from lengthwise.schema.records import RunResult
from lengthwise.schema.workload import Workload


@pytest.fixture(scope="module")
def runs(toy):
    made = []
    for seed, name, seqs in ((1, "</script><b>roomy</b>", 32), (1, "narrow", 4)):
        records = toy.records(200, seed=seed, name=name, max_seqs=seqs, odd=False)
        r = records.requests
        made.append(RunResult(records, Workload(r.arrival_s, r.prompt_tokens, r.output_tokens), "simulate"))
    sent_s = np.linspace(0.0, 0.01, 200)
    return made[0], replace(made[1], source="bench", warnings=("the client <i>was</i> late.",), client_s=sent_s)


@pytest.fixture(scope="module")
def found(runs):
    return compare(*runs, slo=Slo(ttft_s=0.5), draws=200)


def printed(found, width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(compare_table(found))
    return console.file.getvalue()


def test_the_terminal_shows_warnings_first_then_every_number(found) -> None:
    text = printed(found)
    assert text.index("warning: B: the client <i>was</i> late.") < text.index("TTFT mean")
    for label in ("TTFT p95", "TPOT p99", "TBT p50", "JCT mean", "Queueing p90", "Requests/s", "Within SLO"):
        assert label in text
    jct = found["jct.p50"]
    assert f"{100 * jct.error:+.0f} %".replace("-", "\N{MINUS SIGN}") in text
    assert "the same requests, paired" in text
    client = "the client sent requests 5 ms late on average (median 5 ms, at most 10 ms), which TTFT and JCT include"
    assert f"B (bench): 200 of 200 finished; {client}." in text
    assert "A (simulate): 200 of 200 finished." in text


def test_the_file_holds_everything_under_stable_keys(found, tmp_path) -> None:
    write_compare_json(tmp_path / "c.json", found)
    made = json.loads((tmp_path / "c.json").read_text("utf-8"), parse_constant=pytest.fail)
    assert (made["format"], made["version"], made["paired"]) == ("lengthwise.comparison", 1, True)
    assert set(made["errors"]) == {one.key for one in found.errors}
    jct = made["errors"]["jct.p95"]
    assert jct["error"] == pytest.approx((jct["a"] - jct["b"]) / jct["b"])
    assert jct["low"] <= jct["error"] <= jct["high"]
    tbt = made["errors"]["tbt.p95"]
    assert tbt["low"] <= tbt["error"] <= tbt["high"]
    assert made["a"]["client"] is None
    assert made["b"]["client"] == pytest.approx({"mean_s": 0.005, "p50_s": 0.005, "max_s": 0.01})
    assert made["slo"] == {"ttft_s": 0.5}
    assert set(made["distances"]["jct"]) == {
        "count_a", "count_b", "kolmogorov_smirnov", "wasserstein", "mape", "median_ape",
    }  # fmt: skip
    assert made["a"]["counts"]["finished"] == 200


def test_the_page_escapes_names_and_is_the_same_every_time(found, runs, tmp_path) -> None:
    write_compare_html(tmp_path / "a.html", found, *runs)
    write_compare_html(tmp_path / "b.html", found, *runs)
    page = (tmp_path / "a.html").read_text("utf-8")
    assert (tmp_path / "b.html").read_bytes() == (tmp_path / "a.html").read_bytes()
    assert "&lt;/script&gt;&lt;b&gt;roomy&lt;/b&gt;" in page
    assert "<b>roomy</b>" not in page
    assert "the client &lt;i&gt;was&lt;/i&gt; late." in page
    assert "The client sent requests 5 ms late on average" in page
    assert page.index('<dl class="numbers">') < page.index("<figure")
    assert page.index("The answer</h2>") < page.index("late.</li>") < page.index("Errors of A</h2>")


def figures_of(path) -> list[dict]:
    text = path.read_text("utf-8").split('id="figures">')[1].split("</script>")[0]
    return json.loads(text)


def test_figures_are_of_these_runs(found, runs, tmp_path) -> None:
    write_compare_html(tmp_path / "a.html", found, *runs)
    made = {figure["id"]: figure for figure in figures_of(tmp_path / "a.html")}
    error = made["error-jct"]
    assert error["y"][error["x"].index("p95")] == pytest.approx(found["jct.p95"].error, rel=1e-4)
    assert all(low is not None for low in made["error-tbt"]["low"])
    for metric in ("ttft", "jct", "tbt"):
        cdf = made[f"cdf-{metric}"]
        scale = 1.0 if cdf["unit"] == "s" else 1e3
        for curve, value in zip(cdf["curves"], (found[f"{metric}.p50"].a, found[f"{metric}.p50"].b), strict=True):
            assert curve[int(np.searchsorted(cdf["y"], 0.5))] == pytest.approx(value * scale, rel=0.1)
    running = made["time-running"]["curves"]
    assert max(running[1]) > max(running[0])  # a lower limit makes more requests wait
    assert all(math.isfinite(v) and v >= 0 for curve in running for v in curve)


@pytest.fixture(scope="module")
def page(found, runs, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("compare") / "c.html"
    write_compare_html(path, found, *runs)
    return path.as_uri()


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_figures_are_drawn_and_nothing_is_wider_than_the_screen(driver, page, width, scheme) -> None:
    driver.get_log("browser")
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    driver.get(page)
    end = time.monotonic() + 30
    while driver.execute_script("return document.querySelectorAll('.plot .main-svg').length") < 14:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    assert driver.get_log("browser") == []
