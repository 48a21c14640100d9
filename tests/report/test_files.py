"""The JSON file and the page as text."""

from __future__ import annotations

import dataclasses
import json
import re
import sys

import numpy as np
import pytest
from driving import assert_fetches_nothing, without_plotly

from lengthwise.report import Result, write_html, write_json
from lengthwise.report.curves import levels, over_time, quantile_curve
from lengthwise.report.result import sessions, title, workload
from lengthwise.report.summary_table import rows
from lengthwise.schema.errors import InputError, MissingExtraError, OutputError


@pytest.fixture(scope="module")
def page(results, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_html(path, results)
    return path.read_text()


def figures(page: str) -> list[dict]:
    return json.loads(re.search(r'id="figures">(.*?)</script>', page, re.DOTALL)[1])["figures"]


def test_json_holds_every_number_under_stable_keys(results, tmp_path) -> None:
    write_json(tmp_path / "a.json", results)
    text = (tmp_path / "a.json").read_text()
    made = json.loads(text, parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))
    assert (made["format"], made["version"]) == ("lengthwise.results", 1)
    first = made["results"][0]
    assert set(first) == {
        "name", "binding", "deployment", "summary", "scenario", "notes", "model_error", "beyond_reach", "engine",
    }  # fmt: skip
    summary = results[0].summary
    assert first["summary"]["ttft_s"]["p99"]["value"] == summary.ttft_s.p99.value
    assert first["summary"]["ttft_s"]["p99"]["half_width"] == summary.ttft_s.p99.half_width
    assert first["summary"]["goodput"]["slo"] == {"ttft_s": 0.5, "tpot_s": None, "jct_s": 3.0}
    assert first["summary"]["seeds"] == [1, 2, 3]
    assert (first["summary"]["intervals"], first["summary"]["level"]) == ("seeds", 0.95)
    assert first["deployment"]["kv_blocks"] == 600
    assert first["binding"]["resource"]


def test_json_contains_preemption_bins_and_bounds_on_waiting(results, tmp_path) -> None:
    plain = results[0]
    scheduler = dataclasses.replace(
        plain.deployment.scheduler, preemption="by_rank", binning="bins(boundaries=[9])", max_wait_s=30.0
    )
    deployment = dataclasses.replace(plain.deployment, scheduler=scheduler)
    other = dataclasses.replace(plain, name="other", deployment=deployment)
    write_json(tmp_path / "a.json", [plain, other])
    one, two = (r["deployment"] for r in json.loads((tmp_path / "a.json").read_text())["results"])
    keys = ("preemption", "binning", "max_wait_s", "batch_wait_s")
    assert [one[key] for key in keys] == ["never", None, None, None]
    assert [two[key] for key in keys] == ["by_rank", "bins(boundaries=[9])", 30.0, None]
    write_html(tmp_path / "a.html", [plain, other])
    page = (tmp_path / "a.html").read_text()
    assert "<td>none</td><td>bins(boundaries=[9])</td>" in page


def test_unknown_numbers_are_null(results, tmp_path) -> None:
    one = dataclasses.replace(results[0], summary=results[0].summaries[0])
    write_json(tmp_path / "a.json", [one])
    made = json.loads((tmp_path / "a.json").read_text())
    assert made["results"][0]["summary"]["hardware"]["mfu"]["half_width"] is None


def test_the_same_results_give_the_same_bytes(results, page, tmp_path) -> None:
    write_html(tmp_path / "again.html", results)
    assert (tmp_path / "again.html").read_text() == page


def test_the_page_is_small_and_fetches_nothing(page) -> None:
    assert len(page.encode()) < 1.5e6
    assert_fetches_nothing(page, 5e5)


def test_what_users_wrote_is_escaped(page) -> None:
    own = without_plotly(page)
    assert "<b>&</b>" not in own
    assert "alert(1)</script>" not in own
    assert "roomy &lt;b&gt;&amp;&lt;/b&gt;" in own
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in own


def test_the_page_shows_every_section_and_number(results, page) -> None:
    heads = re.findall(r"<h2>(.*?)</h2>", page)
    assert heads[:4] == ["At a glance", "Bottlenecks", "Latency", "Over time"]
    assert "Compared with roomy &lt;b&gt;&amp;&lt;/b&gt;" in heads
    assert page.count('class="card"') == 6
    assert {f["id"] for f in figures(page)} == {
        *("cdf-ttft", "cdf-tbt", "cdf-tpot", "cdf-jct"),
        *("time-batch", "time-waiting", "time-kv", "time-output", "shares"),
    }
    assert f"{results[0].summary.counts.arrivals:,} requests finished" in page


def test_curves_are_quantiles_of_the_records(results, page) -> None:
    ttft = next(f for f in figures(page) if f["id"] == "cdf-ttft")
    r = results[1].records.requests
    values = (r.first_token_s - r.arrival_s)[np.isfinite(r.first_token_s)]
    curve = next(c for c in ttft["curves"] if c["variant"] == 1)
    scale = 1e3 if ttft["unit"] == "ms" else 1.0
    for x, y in list(zip(curve["x"], ttft["y"], strict=True))[::37]:
        assert x / scale == pytest.approx(np.quantile(values, y, method="inverted_cdf"), rel=1e-4)
    assert ttft["limits"] == [0.5 * scale]


def test_the_gap_curve_matches_expanded_gaps(results) -> None:
    at, gaps = levels(200), results[0].records.gaps
    spelt = np.repeat(gaps.gap_s, gaps.count)
    exact = quantile_curve(results[0].records, "tbt", at)
    assert exact == pytest.approx(np.quantile(spelt, at, method="inverted_cdf"))
    coarse = dataclasses.replace(gaps, gap_s=None, count=None)
    records = dataclasses.replace(results[0].records, gaps=coarse)
    read = quantile_curve(records, "tbt", at)
    assert read == pytest.approx(exact, rel=1 / 256)


def test_folded_bins_preserve_means_over_steps(results) -> None:
    series = results[0].records.series
    curves = over_time(results[0], 10)
    assert len(curves["time_s"]) <= 10
    fold = -(-len(series.step_s) // 10)
    first = slice(0, fold)
    assert curves["batch"][0] == pytest.approx(series.seqs_s[first].sum() / series.step_s[first].sum())
    assert curves["kv"][0] == pytest.approx(series.kv_blocks_s[first].sum() / series.step_s[first].sum() / 600)
    assert curves["output"][0] == pytest.approx(series.output_tokens[first].sum() / fold / series.bin_s)


def test_many_variants_stay_small(results, tmp_path) -> None:
    many = [dataclasses.replace(results[i % 2], name=f"variant {i}", summaries=()) for i in range(40)]
    write_html(tmp_path / "many.html", many)
    assert (tmp_path / "many.html").stat().st_size < 1.5e6


def test_one_variant_without_hardware_or_slo(toy, results, tmp_path) -> None:
    bare = dataclasses.replace(results[0].summaries[0], hardware=None, goodput=None)
    one = Result("one", bare, results[0].records, toy.deployment())
    write_html(tmp_path / "one.html", [one])
    text = without_plotly((tmp_path / "one.html").read_text())
    assert "Compared with" not in text
    assert "Where the time went" not in text
    assert "Scenario of" not in text


def test_unwritable_outputs_raise(results, tmp_path, monkeypatch) -> None:
    for write in (write_html, write_json):
        with pytest.raises(OutputError, match="does not exist"):
            write(tmp_path / "no" / "a", results)
        with pytest.raises(InputError, match="empty"):
            write(tmp_path / "a", [])
    monkeypatch.setitem(sys.modules, "markupsafe", None)
    with pytest.raises(MissingExtraError, match=r"lengthwise\[report\]"):
        write_html(tmp_path / "a.html", results)
    assert list(tmp_path.iterdir()) == []


DESCRIBED = """name = "chat"
description = "Which <b>one</b>?"
[workload]
preset = "chat-1m"
request_rate = 4.5
"""


def test_the_header_describes_the_scenario(results, tmp_path) -> None:
    write_html(tmp_path / "a.html", [dataclasses.replace(r, scenario_text=DESCRIBED) for r in results])
    header = re.search(r"<header>.*?</header>", (tmp_path / "a.html").read_text(), re.DOTALL)[0]
    assert "<h1>Which &lt;b&gt;one&lt;/b&gt;?</h1>" in header
    for fact in ("toy-7b on 1 ", "chat-1m, 4.5 requests/s", "TTFT ≤ 500 ms, JCT ≤ 3.00 s", "3 seeds"):
        assert fact in header


@pytest.mark.parametrize(
    ("text", "states"),
    [
        (
            "[workload]\nconcurrency = 32\nprompt = 512\noutput = 128",
            "prompts 512, outputs 128, 32 concurrent requests",
        ),
        ('[workload]\ntrace = "a.csv"', "a.csv"),
        (
            '[workload]\nrequest_rate = inf\nprompt = { kind = "lognormal", median = 400.0 }\noutput = 1',
            "prompts lognormal median 400, outputs 1, all at once",
        ),
        ('[workload]\npreset = "x"\narrivals = { kind = "all_at_once" }', "x, all at once"),
        ("", ""),
    ],
)
def test_workloads_in_words(results, text, states) -> None:
    words = workload(dataclasses.replace(results[0], scenario_text=text))
    assert words.startswith(states)
    assert bool(words) == bool(states)


AGENTS = """[workload]
session_rate = 2.0
prompt = { kind = "fixed", tokens = 512 }
output = 128
[workload.sessions]
turns = 3.0
[workload.groups]
count = 1
system_prompt = { kind = "fixed", tokens = 6000 }
[workload.tools]
calls = 8.0
"""


def test_sessions_in_words(results, tmp_path) -> None:
    agents = dataclasses.replace(results[0], scenario_text=AGENTS)
    assert workload(agents) == "prompts 512, outputs 128"
    assert sessions(agents) == "2 sessions/s, 3 turns, 8 tool calls a turn, 1 system prompt of 6,000 tokens"
    assert sessions(dataclasses.replace(results[0], scenario_text=DESCRIBED)) == ""
    write_html(tmp_path / "a.html", [agents])
    assert f"<li>{sessions(agents)}</li>" in (tmp_path / "a.html").read_text()


def test_every_setting_in_which_variants_differ_is_shown(results, tmp_path) -> None:
    texts = (
        f'name = "{name}"\n[engine]\nenable_prefix_caching = {on}\nprefix_cache = "vllm"\nmax_num_seqs = {size}\n{more}'
        for name, on, size, more in (
            ("a", "true", 7, "[engine.kv_offloading]\nsize_gb = 64.0"),
            ("b", "true", 8, "[engine.kv_offloading]\nsize_gb = 128.0\nload = 'if_faster'"),
            ("c", "false", 9, ""),
        )
    )
    asking = [dataclasses.replace(results[0], name=t[8], scenario_text=t) for t in texts]
    write_html(tmp_path / "a.html", asking)
    ran = (tmp_path / "a.html").read_text()
    ran = ran[ran.index('aria-label="Differences in configuration"') :]
    found = {
        re.sub("<.*?>", "", row.partition("</th>")[0]): re.findall("<td>(.*?)</td>", row)
        for row in re.findall("<tr>(<th scope=.row.*?)</tr>", ran)
    }
    assert found == {
        "engine.enable_prefix_caching": ["yes", "yes", "no"],
        "engine.kv_offloading.size_gb": ["64.00", "128.00", "\N{EN DASH}"],
        "engine.kv_offloading.load": ["\N{EN DASH}", "if_faster", "\N{EN DASH}"],
    }


def test_without_a_description_a_name_or_the_hardware_is_the_title(results) -> None:
    named = dataclasses.replace(results[0], scenario_text='name = "chat"')
    assert title([named]) == "chat"
    assert title([named, results[1]]).startswith("toy-7b on 1 ")


def test_curves_have_the_unit_of_their_numbers(results, page) -> None:
    units = {row.metric.key.partition(".")[0]: row.unit for row in rows(results)}
    for figure in figures(page):
        if figure["kind"] == "cdf":
            assert figure["unit"] == units[f"{figure['id'].removeprefix('cdf-')}_s"]


def test_a_few_workloads_are_all_named(results, tmp_path) -> None:
    texts = [f'[workload]\npreset = "x"\nconcurrency = {n}' for n in (1, 2)]
    asking = [dataclasses.replace(r, scenario_text=t) for r, t in zip(results, texts, strict=True)]
    write_html(tmp_path / "a.html", asking)
    assert "x, 1 concurrent requests / x, 2 concurrent requests" in (tmp_path / "a.html").read_text()
