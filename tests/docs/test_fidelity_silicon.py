"""Headlines of part of the measured deployments stand beside what all of them say, and what got no figure."""

from __future__ import annotations

from functools import partial

import pytest
from generated_pages import imported, table
from generated_pages import row as any_row

row = partial(any_row, unit="relative")
NAME = "fidelity.silicon.roofline_unseen."


@pytest.fixture(scope="module")
def generator():
    with imported("generate_fidelity") as script:
        yield script


def of(points: int, p50: float, p90: float) -> dict:
    return {"points": points, "p50": p50, "p90": p90}


def silicon(part: str, p50: float, *, all_points: int = 30, **more: object) -> dict:
    details = of(20, p50, 2 * p50) | {
        "interval": [p50 / 2, p50 * 2],
        "bias": 0.01,
        "left_out": {"separate workers": 1200, "no clients": 7, "nothing": 0},
        "all_agg_points": of(all_points, 0.25, 1.5),
        "sweeps": of(all_points - 20, 0.5, 2.0),
    }
    return row(f"{NAME}{part}_median_ape", p50, target=0.3, details=details | more)


def part(text: str, title: str) -> str:
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_all_points_stand_beside_the_headline_wherever_it_does(generator):
    text = generator.page([silicon("ttft", 0.175), silicon("tpot", 0.09, decode_workers=of(8, 0.11, 0.2))])
    cells = {cells[2]: cells[3:] for cells in table(text, "At a glance")}
    assert cells["all 30 aggregated points of that sample (AIConfigurator's), sweeps of unknown clients too"] == [
        "median 25 % (P90 150 %)",
        "median 25 % (P90 150 %)",
        "-",
    ]
    for told in (
        "**Of 1,237 deployments",
        "headlines are of the 20 whose",
        "Over all 30 aggregated points medians are TTFT 25 % (P90 150 %)",
        "the 10 sweeps of unknown clients alone TTFT 50 % (P90 200 %)",
        "1,207 get no figure, 1,200 of them for separate workers",
    ):
        assert told in part(text, "Where this stands"), told
    section = part(text, "Thousands of measured deployments")
    assert "| separate workers | 1,200 |\n| no clients | 7 |\n" in section
    assert "| nothing |" not in section
    assert "of 8 decode workers of at most a node: median 11 % (P90 20 %)" in section


@pytest.mark.parametrize(("target", "report"), [(0.3, "within the aim"), (0.21, "missed")])
def test_a_verdict_says_what_all_points_would_be_called(generator, target, report):
    text = generator.page([silicon("ttft", 0.1) | {"target": target}])
    decision = table(text, "Figures and aims")[0][3]
    assert decision == f"met; over all 30 aggregated points 25 %: {report}"


def test_where_the_headline_is_of_all_points_nothing_is_said_twice(generator):
    text = generator.page([silicon("ttft", 0.1, all_points=20, sweeps={"points": 0})])
    assert "aggregated points" not in text
    assert table(text, "Figures and aims")[0][3] == "met"


def test_the_committed_page_tells_all_points_of_the_committed_rows(generator):
    rows = {row["name"]: row["details"] for row in generator.results(generator.RESULTS)}
    text = generator.PAGES[0].read_text("utf-8")
    for name in ("ttft", "tpot"):
        every = rows[f"{NAME}{name}_median_ape"]["all_agg_points"]
        assert f"over all {every['points']:,} aggregated points {100 * every['p50']:.3g} %" in text
    for why, n in rows[f"{NAME}ttft_median_ape"]["left_out"].items():
        assert f"| {why} | {n:,} |" in text


def test_bounds_of_tests_are_those_that_the_tests_have(generator, monkeypatch, tmp_path):
    judging = tmp_path / "judging.py"
    text = generator.tested.__globals__["JUDGING"].read_text("utf-8")
    judging.write_text(text.replace("WITHIN = 0.35", "WITHIN = 0.123"))
    assert "an error may be 35 % of the median" in generator.page([])
    monkeypatch.setitem(generator.tested.__globals__, "JUDGING", judging)
    assert "an error may be 12.3 % of the median" in generator.page([])


def test_a_campaign_that_two_files_keep_is_told_once_by_its_newer_runs(generator):
    kept = [row("fidelity.gpu.x.jct_p50_error", value, details={"measured_at": when})
            for value, when in ((0.1, "2026-12-02"), (0.2, "2026-12-01"))]  # fmt: skip
    assert [one["value"] for one in generator.newest(kept)] == [0.1]
    assert [one["value"] for one in generator.newest(kept[::-1])] == [0.1]
