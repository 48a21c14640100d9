"""The page of the gateway is what the committed results say, and the tests that documents name are there."""

from __future__ import annotations

import re
import sys

import pytest
from documents import ROOT
from generated_pages import by_first, check_committed, imported, row

TESTS = ROOT / "tests"


@pytest.fixture(scope="module")
def generator():
    with imported("generate_gateway") as script:
        yield script


def test_the_page_is_what_the_committed_results_say():
    check_committed("generate_gateway")


def test_what_is_not_measured_is_called_so(generator):
    text = generator.page([row("gateway.rps", 2000.0), row("gateway.rss_growth_mib", None)])
    figures = by_first(text, "Figures and aims")
    assert figures["`gateway.rps`"][1:] == ["2,000 requests/s", "at least 1,500 requests/s", "met, no interval", ""]
    assert figures["`gateway.rss_growth_mib`"][1] == "not measured yet"
    assert figures["`gateway.live.gap_closed`"][1] == "not measured yet"
    assert "Not measured yet." in text.partition("## What order gains")[2].partition("\n## ")[0]


def test_aims_that_are_missed_are_called_so_and_follow_the_results(generator):
    figures = by_first(
        generator.page(
            [
                row("gateway.added_p50_ms", 1.4, ci=(1.2, 1.6), target=1.0),
                row("gateway.cpu_us_per_token", 90.0, target=80.0),
                row("gateway.live.gap_closed", 0.4, better="higher"),
            ]
        ),
        "Figures and aims",
    )
    assert figures["`gateway.added_p50_ms`"][1:] == ["1.4 [1.2, 1.6] ms", "at most 1 ms", "missed", ""]
    assert figures["`gateway.cpu_us_per_token`"][2:4] == ["at most 80 us", "missed"]
    assert figures["`gateway.live.gap_closed`"][3] == "missed"


@pytest.mark.parametrize(
    ("name", "value", "ci", "stands"),
    [
        ("gateway.live.gap_closed", 0.56, (0.51, 0.6), "met"),
        ("gateway.live.gap_closed", 0.56, (0.455, 0.665), "borderline: the interval reaches beyond"),
        ("gateway.live.gap_closed", 0.48, (0.4, 0.56), "missed"),
        ("gateway.live.p99_over_oracle", 1.05, (0.938, 1.15), "borderline: the interval reaches beyond"),
        ("gateway.added_p50_ms", 0.94, (0.92, 0.99), "met"),
        ("gateway.added_p50_ms", 0.94, None, "met, no interval"),
    ],
)
def test_an_aim_is_met_where_both_ends_of_the_interval_meet_it(generator, name, value, ci, stands):
    figures = by_first(generator.page([row(name, value, ci=ci)]), "Figures and aims")
    assert figures[f"`{name}`"][3] == stands


def test_it_is_told_how_many_results_the_simulator_foretold_and_where_noise_hides_it(generator):
    details = {"within": 4, "not within": 2, "too noisy to tell": 3, "telling_half_widths": {}}
    figures = by_first(
        generator.page([row("gateway.live.simulated_within", 4 / 9, details=details)]), "Figures and aims"
    )
    assert figures["`gateway.live.simulated_within`"][1:] == [
        "0.444: 4 within, 2 not within, 3 too noisy to tell",
        "at least 0.95",
        "missed",
        "",
    ]


def test_a_cell_whose_oracle_is_no_faster_than_fcfs_is_called_noise(generator):
    def of(load, fcfs_s, oracle_s):
        means = {"fcfs": fcfs_s, "isrtf": 0.3, "oracle": oracle_s}
        return {"load": load, "batch": 4, "policies": {k: {"mean_s": v, "p99_s": 2.0} for k, v in means.items()}}

    metric = {"value": 0.6, "ci": [0.5, 0.7], "simulated": None}
    told = dict.fromkeys(("gap_closed", "p99_over_oracle", "mean_over_fcfs"), metric)
    cells = [of(1.0, 0.4, 0.45), of(3.0, 0.9, 0.6)]
    text = generator.page([row("gateway.live.gap_closed", 0.6, details={"policies": {"isrtf": told}, "cells": cells})])
    assert "| 1x | 4 | 0.4, 2 | 0.3, 2 | 0.45, 2 | noise |" in text
    assert "| 3x | 4 | 0.9, 2 | 0.3, 2 | 0.6, 2 | |" in text


def test_peers_stand_beside_with_the_machines_pace_and_a_dash_is_no_figure(generator):
    beside = by_first(
        generator.page(
            [
                row("gateway.rps", 2000.0),
                row("gateway.machine_pace", 5400.0),
                row("gateway.machine_pace_io", 8100.0),
                row("peer.litellm.rps", 41.0),
            ]
        ),
        "What it costs",
    )
    assert beside["**lengthwise**"] == ["-", "-", "2,000", "-", "-", "-", "5,400", "8,100", ""]
    assert beside["LiteLLM"][2] == "41"
    assert set(beside["smg (Rust)"][:-1]) == {"-"}


def test_a_peer_of_another_run_is_called_so(generator):
    def at(name, retained):
        return row(name, 41.0) | {"retained": retained}

    rows = [
        at("gateway.rps", "2026-11-22T10:00+00:00"),
        at("peer.smg.rps", "2026-11-22T10:02+00:00"),
        at("peer.litellm.rps", "2026-11-20T10:02+00:00"),
        row("peer.vllm_router.rps", 50.0),
    ]
    beside = by_first(generator.page(rows), "What it costs")
    assert {"**lengthwise**", "smg (Rust)", "LiteLLM (another run)", "vllm-router (Rust) (another run)"} <= set(beside)


def test_every_row_has_its_date(generator):
    at = {"retained": "2026-11-22T10:00+00:00"}
    peaks = [row(f"gateway.peak_rps_{count}", 4.0 * count) | at for count in (10, 50)]
    text = generator.page([row("gateway.rps", 41.0) | at, row("peer.smg.rps", 41.0) | at, *peaks])
    assert by_first(text, "Figures and aims")["`gateway.rps`"][-1] == "2026-11-22 10:00 UTC"
    assert by_first(text, "Figures and aims")["`gateway.added_p50_ms`"][-1] == ""
    assert by_first(text, "What it costs")["smg (Rust)"][-1] == "2026-11-22 10:00 UTC"
    assert "Measured on 2026-11-22 10:00 UTC." in text.partition("## How it scales")[2]


def test_how_finely_the_ratio_of_peak_rates_is_known_is_told(generator):
    """Of each the next rate that was tried did not hold."""

    def probes(*delays):
        return [{"share": share, "delay_s": delay_s} for share, delay_s in delays]

    peaks = [row(f"gateway.peak_rps_{count}", 4.0 * count) for count in (10, 50)]
    details = {"10": probes((0.5, 0.1), (0.8, 0.4), (0.84, 0.6)), "50": probes((0.5, 0.1), (0.8, 0.2), (0.9, 0.51))}
    text = generator.page([*peaks, row("gateway.scale_50_over_10", 5.0, details=details)])
    assert "is known to ±12.5 %: it lies between 4.76 and 5.62." in text
    details["50"] = probes((0.5, 0.1), (0.8, 0.2))
    assert "is known to" not in generator.page([*peaks, row("gateway.scale_50_over_10", 5.0, details=details)])


def gains(kind: str, cuts: int, *, off_by: float = 0.0, error: float = 0.2, load_1m: float = 5.0):
    metric = {"value": 0.8, "ci": [0.7, 0.9], "simulated": 0.8, "off_by": off_by}
    told = dict.fromkeys(("gap_closed", "p99_over_oracle", "mean_over_fcfs"), metric)
    cells = [
        {"load": 1.0, "batch": 2, "policies": {"isrtf": {"mean_s": 9.0, "p99_s": 2.0, "cuts": cuts, "requests": 400}}}
    ]
    details = {"policies": {"isrtf": told}, "cells": cells, "engines": "2 engines"}
    details |= {"services": {"1": {"error": error}, "2": {"error": error / 10}}}
    details |= {"machine": {"cpu": "a", "cores": 2, "python": "3.11", "load_1m": load_1m}}
    return row(f"gateway.{kind}.gap_closed", 0.6, details=details)


def test_where_nobody_was_cut_that_is_told(generator):
    assert "In these runs *isrtf* cut nobody (400 requests)" in generator.page([gains("live", 0)])
    assert "*isrtf* cut 3 times in 400 requests" in generator.page([gains("live", 3)])
    text = generator.page([gains("live", 40)])
    assert "cut nobody" not in text
    assert "40 times in" not in text


def test_why_the_simulator_misses_its_aim_is_told_of_what_the_runs_kept(generator):
    outside = {"outside": ["isrtf, gap_closed", "isrtf, p99_over_oracle", "windowed, gap_closed"]}
    missed = row("gateway.live.simulated_in_interval", 0.4, target=0.95, details=outside)
    real, emulated = gains("live", 0, error=0.31), gains("emulated", 0, off_by=0.016, error=0.05, load_1m=1.0)
    text = generator.page([real, missed, emulated])
    assert "foretold of *isrtf* (gap and P99); *windowed* (gap)." in text
    assert "have 2 cores between them (load average at the end: 5)" in text
    assert "off by 31 and 3.1 % in the median at batches of 1 and 2," in text
    assert "(load average at the end: 1), the fit is off by 5 and 0.5 %" in text
    assert "is foretold within 2.0 %" in text
    assert "Why the simulator misses" not in generator.page([real, {**missed, "value": 0.96}, emulated])
    assert "Before emulated engines" not in generator.page([real, missed])


def test_the_gain_is_told_by_policy_with_what_the_simulator_said(generator):
    metric = {"value": 0.6, "ci": [0.5, 0.7], "simulated": 0.8, "simulated_ci": [0.75, 0.85]}
    metric |= {"report": "not within", "off_by": -0.2, "off_by_half_width": 0.05}
    told = dict.fromkeys(("gap_closed", "p99_over_oracle", "mean_over_fcfs"), metric)
    cells = [{"load": 3.0, "batch": 2, "policies": {"fcfs": {"mean_s": 9.0, "p99_s": 21.5}}}]
    text = generator.page([row("gateway.live.gap_closed", 0.6, details={"policies": {"isrtf": told}, "cells": cells})])
    assert by_first(text, "What order gains")["isrtf"][:3] == [
        "0.6 [0.5, 0.7]",
        "-",
        "0.8 [0.75, 0.85] (not within: off by -0.2 ± 0.05)",
    ]
    assert "| 3x | 2 | 9, 21.5 | |" in text


def test_cuts_and_the_gain_at_one_pace_and_before_emulated_engines_are_told(generator):
    def details(gap, cuts):
        told = {name: {"value": gap} for name in ("gap_closed", "p99_over_oracle", "mean_over_fcfs")}
        of = {"mean_s": 9.0, "p99_s": 21.5, "cuts": cuts, "requests": 40}
        cells = [{"load": load, "batch": 2, "policies": {"isrtf": of}} for load in (1.0, 3.0)]
        paced = {"isrtf": {"gap_closed": {"value": gap + 0.1, "ci": [gap, gap + 0.2]}}}
        return {"policies": {"isrtf": told}, "cells": cells, "paced": paced}

    real, emulated = (
        row(f"gateway.{kind}.gap_closed", gap, details=details(gap, cuts))
        for kind, gap, cuts in (("live", 0.5, 10), ("emulated", 0.7, 0))
    )
    text = generator.page([real, emulated])
    first, second = (line for line in text.splitlines() if line.startswith("| isrtf |"))
    assert first.split(" | ")[1:3] == ["0.5", "0.6 [0.5, 0.7]"]
    assert first.endswith("| 0.25 |")
    assert second.split(" | ")[1] == "0.7"
    assert second.endswith("| 0 |")


def named_in(file: str) -> set[str]:
    return set(re.findall(r"^def (test_\w+)", (TESTS / file).read_text("utf-8"), re.MULTILINE))


def test_every_fault_names_tests_that_are_there(generator):
    faults = sys.modules["_gateway_faults"].FAULTS
    named = [test for _, rows in faults for _, _, tests in rows for test in tests]
    assert len(named) > 30
    for test in named:
        file, _, name = test.partition("::")
        assert name in named_in(file), test


def test_laws_of_the_gateway_name_tests_that_are_there():
    text = (ROOT / "docs/laws.md").read_text("utf-8")
    part = text.partition("## The gateway\n")[2].partition("\n## ")[0]
    file, count = "", 0
    for path, name in re.findall(r"`([\w/]+\.py)?(?:::(test_\w+))?`", part):
        if path.startswith("src/") or not (path or name):
            continue
        if path:
            file = path.removeprefix("tests/") if path.startswith("tests/") else f"gateway/{path}"
            assert (TESTS / file).exists(), path
        assert not name or name in named_in(file), f"{file}::{name}"
        count += 1
    numbers = [int(number) for number in re.findall(r"^(\d+)\. \*\*", text, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert count > 25
