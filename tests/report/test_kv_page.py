"""The page of the prefix cache: its sentences, and that headless Chromium draws it within the screen."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest
from driving import look

from lengthwise.report.kv import answers, size_rows, write_kv_html
from lengthwise.schema.estimate import UNKNOWN, Estimate
from lengthwise.schema.kv import CacheSize, Found, KvStudy, Loading, TierShare


def size(name, blocks, share, price=math.nan, *, given=False, net=UNKNOWN):
    found = Estimate(share, 0.02)
    saved = Estimate(3000 * share, 50, 2000 * share, 4000 * share)
    cost = Estimate(price, price / 2, price / 3, price * 2)
    sizes = (name, blocks, 16 * blocks, blocks / 1000)
    return CacheSize(*sizes, found, found, found, saved, cost, cost, net_usd_per_hour=net, is_given=given)


NET = Estimate(0.05, 0.02, 0.01, 0.2)
STUDY = KvStudy(
    name="<b>&",
    metadata=("100 requests",),
    block_tokens=16,
    bytes_per_token=62_500.0,
    curve=(size("", 1, 0.0), size("", 10_000, 0.3), size("", 50_000, 0.6)),
    sizes=(size("GPU pool", 10_000, 0.3, given=True), size("50 GB", 50_000, 0.6, 2e-4, given=True, net=NET)),
    found=Found(simulated=Estimate(0.25, 0.01)),
    new_tokens=200,
    prefix_tokens=(16, 1024, 8192),
    compute_s=(0.001, 0.06, 0.6),
    loadings=(
        Loading("CPU memory", 25.0, Estimate(16.0, math.nan, 16.0, 32.0), (1e-4, 5e-3, 4e-2)),
        Loading("tape", 0.01, Estimate(math.inf), (0.1, 10.0, 80.0)),
    ),
    usd_per_gb_hour=0.005,
    gpu_usd_per_s=3e-4,
    notes=("a note",),
)

TIERS = (
    TierShare("GPU pool", 10.0, Estimate(0.3, 0.02), Estimate(0.25, 0.01)),
    TierShare("CPU memory", 50.0, Estimate(0.24, 0.01), Estimate(0.2, 0.01)),
    TierShare("storage", math.inf, Estimate(0.06), Estimate(0.05)),
)
TIERED = replace(
    STUDY,
    curve=tuple(replace(size, hierarchy_share=Estimate(0.6)) for size in STUDY.curve),
    sizes=tuple(replace(size, hierarchy_share=Estimate(0.6, 0.02)) for size in STUDY.sizes),
    tiers=TIERS,
)


def test_answers_state_pool_loads_and_price():
    text = " ".join(answers(STUDY))
    assert "finds 60.0 ± 2.0 % of the prompt tokens; 50.0 GB (800,000 tokens) per replica finds 90 % of that" in text
    assert "The GPU pool of 160,000 tokens (10.0 GB) finds 30.0 ± 2.0 %, and 25.0 ± 1.0 % where" in text
    assert "prefixes of 16 tokens (16\N{EN DASH}32) on" in text
    assert "A prefix of 1,024 tokens takes 5.00 ms to load and 60.0 ms to compute" in text
    assert "Loading from tape at 0.01 GB/s of each GPU is never faster" in text
    assert "more memory adds at most 30 percentage points to the first figure, 35 to the second" in text
    # $0.005 x 50 GB, and $0.3 for 1,000 s at $0.0003.
    assert "memory pays: of these sizes 50 GB has the largest net saving; it costs $0.25/h and saves $0.3/h" in text
    assert "(1,000 s of prefill beyond the GPU pool): a net 0.050 ± 0.020 (0.010 to 0.20) $/h." in text


def priced(*nets):
    sizes = (size("GPU pool", 10_000, 0.3), *(size(f"{i} GB", 50_000 + i, 0.6, net=net) for i, net in enumerate(nets)))
    return answers(replace(STUDY, sizes=sizes))[-1]


@pytest.mark.parametrize(
    ("net", "verdict"),
    [
        (NET, "memory pays"),
        (Estimate(0.05, 0.06, 0.01, 0.2), "memory may pay"),
        (Estimate(0.05, 0.02, -0.01, 0.2), "memory may pay"),
        (Estimate(0.05, math.nan, 0.01, 0.2), "memory pays"),
        (Estimate(-0.05, 0.06), "memory may not pay"),
        (Estimate(-0.05, 0.02, -0.1, 0.01), "memory may not pay"),
        (Estimate(-0.05, 0.02, -0.1, -0.01), "memory does not pay"),
    ],
)
def test_the_verdict_is_certain_only_where_no_interval_spans_zero(net, verdict):
    assert verdict in priced(net)
    assert ("It would pay below $" in priced(net)) == (net.value < 0)


def test_the_size_with_the_largest_net_saving_is_named_and_the_step_beyond_it():
    text = priced(Estimate(0.01), Estimate(0.03), Estimate(0.029), Estimate(-0.1))
    assert "1 GB has the largest net saving" in text
    assert "The step to 2 GB costs" in text


def test_a_step_that_saves_no_more_than_the_rounding_of_floats_saves_nothing():
    # Each size saves $0.3; sums of floats differ from it by about 1e-16.
    nets = [0.3 - 0.005 * (50_000 + i) / 1000 for i in range(40)]
    for first in range(39):
        text = priced(*([Estimate(-1.0)] * first), *map(Estimate, nets[first:]))
        assert f"The step to {first + 1} GB costs $5e-06/h and saves nothing." in text


@pytest.mark.parametrize(
    ("storage_usd", "sentence"),
    [
        (
            0.0,
            "memory does not pay: of the sizes that find more than the GPU pool, 50 GB loses least; it costs $0.25/h",
        ),
        (0.1, "for an hour of the replica's storage, memory with this storage does not pay"),
        (0.1, "it costs $0.35/h and saves $0.3/h"),
        (0.1, "It would pay below $0.004 for a GB of memory and hour."),
        (0.4, "The storage alone costs more than memory and storage save together."),
    ],
)
def test_the_price_of_the_storage_is_in_what_memory_costs(storage_usd, sentence):
    # Memory of 50 GB for $0.25, which saves $0.2, or with a storage $0.3.
    net = 0.3 - 0.25 - storage_usd if storage_usd else -0.05
    one = size("50 GB", 50_000, 0.6, net=Estimate(net))
    tiers = (*TIERS[:2], replace(TIERS[2], usd_per_hour=storage_usd))
    text = answers(replace(STUDY, sizes=(STUDY.sizes[0], one), tiers=tiers))[-1]
    assert sentence in text


@pytest.mark.parametrize(("share", "points"), [(0.31, "1 percentage point to"), (0.32, "2 percentage points to")])
def test_one_point_is_singular(share, points):
    curve = (*STUDY.curve[:1], size("", 50_000, share))
    assert f"more memory adds at most {points} the first figure" in " ".join(answers(replace(STUDY, curve=curve)))


def test_what_the_simulated_memory_brings_is_in_the_points_of_the_bound():
    text = " ".join(answers(TIERED))
    assert "35 to the second" in text
    assert "GPU pool of 10.0 GB, CPU memory of 50.0 GB and storage find 30.0 ± 2.0, 24.0 ± 1.0 and 6.00 %" in text
    assert "each beyond those before it; in the simulation they find 25.0 ± 1.0, 20.0 ± 1.0 and 5.00 %." in text
    # A memory without outputs: the GPU pool has them, so that the bound is that of a cache with outputs.
    assert "at most 50 percentage points" in " ".join(
        answers(replace(STUDY, found=replace(STUDY.found, unlimited=Estimate(0.8))))
    )


def test_the_curve_of_all_tiers_names_them(tmp_path):
    for study, label in (
        (TIERED, "this memory, the GPU pool and the storage"),
        (replace(TIERED, tiers=TIERS[:2]), "this memory and the GPU pool"),
    ):
        write_kv_html(tmp_path / "page.html", study)
        assert f"found by {label}" in (tmp_path / "page.html").read_text("utf-8")


def test_a_column_without_numbers_is_left_out():
    assert {"net, $/h", "$ per saved s"} <= set(size_rows(STUDY)[0])
    assert set(size_rows(TIERED)[0]) - set(size_rows(STUDY)[0]) == {"with the pool, %"}
    assert "$ per saved s" not in size_rows(replace(STUDY, sizes=STUDY.sizes[:1]))[0]


def test_memory_that_saves_nothing_pays_at_no_price():
    text = priced(Estimate(-0.25))  # 50 GB cost $0.25/h
    assert "it costs $0.25/h and saves nothing" in text
    assert text.endswith("No price would make it pay, because it saves nothing.")


def test_nothing_found_is_one_sentence():
    nothing = replace(STUDY, curve=(size("", 1, 0.0),))
    (sentence,) = answers(nothing)
    assert "finds nothing: no prompt begins with the same full block of 16 tokens as an earlier request" in sentence


def test_error_bars_of_shares_end_at_0_and_100_percent(tmp_path):
    shares = Estimate(0.01, 0.05), Estimate(0.97, 0.05), Estimate(0.5, 0.05), Estimate(0.5)
    sizes = tuple(replace(size(f"{i}", 10_000 + i, 0.3), token_share=share) for i, share in enumerate(shares))
    write_kv_html(tmp_path / "page.html", replace(STUDY, sizes=sizes))
    page = (tmp_path / "page.html").read_text("utf-8")
    assert page.index('<dl class="numbers">') < page.index("<figure")
    found = json.loads(re.search(r'<script[^>]*id="figures"[^>]*>(.*?)</script>', page, re.DOTALL)[1])
    (marks,) = (curve for curve in found[0]["curves"] if curve["mode"] == "markers")
    assert marks["down"] == [pytest.approx(0.01), *[pytest.approx(0.05)] * 2, None]
    assert marks["up"] == [pytest.approx(0.05), pytest.approx(0.03), pytest.approx(0.05), None]


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 400])
def test_curves_are_drawn_and_nothing_is_wider_than_the_screen(driver, tmp_path, width):
    driver.get_log("browser")
    write_kv_html(tmp_path / "page.html", TIERED)
    assert "&lt;b&gt;&amp;" in (tmp_path / "page.html").read_text("utf-8")
    look(driver, (tmp_path / "page.html").as_uri(), width, "light", plots=2)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    assert "GPU pool" in driver.execute_script("return document.getElementById('hits').textContent")
    if width >= 1280:  # no column is behind a scroll bar
        box = "document.querySelector('.scroll')"
        assert driver.execute_script(f"return {box}.scrollWidth - {box}.clientWidth") <= 0
    assert [line for line in driver.get_log("browser") if line["level"] == "SEVERE"] == []
