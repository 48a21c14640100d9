"""The page of fidelity is what the committed results say, however much of them there is."""

from __future__ import annotations

import sys
from functools import partial

import pytest
from documents import ROOT
from generated_pages import check_committed, imported, table
from generated_pages import row as any_row

OTHERS = ("Vidur", "LLMServingSim 2", "Frontier", "BLIS", "SamuLLM", "AIConfigurator")


row = partial(any_row, unit="relative")


@pytest.fixture(scope="module")
def generator():
    with imported("generate_fidelity") as script:
        yield script


def test_the_page_is_what_the_committed_results_say():
    check_committed("generate_fidelity")


def glance(text: str) -> dict[str, list[str]]:
    """TTFT, TPOT and latency by what was measured."""
    return {cells[2]: cells[3:] for cells in table(text, "At a glance")}


def test_without_results_there_are_dashes_and_what_others_state(generator):
    text = generator.page([])
    rows = table(text, "At a glance")
    assert all(len(cells) == 6 for cells in rows)
    ours = [cells for cells in rows if cells[0] == "**lengthwise**"]
    assert len(ours) == 10
    assert all(cells[3:] == ["-", "-", "-"] for cells in ours)
    for name in OTHERS:
        assert any(name in cells[0] for cells in rows), name
    assert glance(text)["vLLM on H100"] == ["median 17.6 % (P99 29 %)", "median 7.1 % (ITL)", "median 6.7 %"]
    assert table(text, "Figures and aims") == []


def test_each_ground_truth_stands_in_its_columns_with_what_is_known_of_chance(generator):
    runs = {"held_out": ["a", "b", "c"], "range": [0.02, 0.5]}
    told = glance(
        generator.page(
            [
                row("fidelity.live.ttft_p50_error", 0.2, details=runs, target=0.1),
                row("fidelity.live.ttft_p95_error", 0.3, details=runs),
                row("fidelity.live.jct_p50_error", None),
                row("fidelity.recorded.tpot_mape", 0.012, ci=[0.01, 0.0155],
                    details={"llmservingsim_mape": 0.0064}),
                row("fidelity.silicon.tables.tpot_median_ape", 0.04, details={"interval": [0.03, 0.06]}),
                row("fidelity.gpu.h200.jct_p95_error", 0.07, details=runs),
            ]
        )
    )  # fmt: skip
    live = "P50 20 %, range [2 to 50] over 3 runs; P95 30 %, range [2 to 50] over 3 runs"
    assert told["vLLM on a CPU: 85 % of capacity, and another setting"] == [live, "-", "-"]
    assert told["three recorded vLLM runs on RTX 4090 and RTX PRO 6000"] == ["-", "1.2 % [1 to 1.55]", "-"]
    assert told["the same three recorded runs, from its own summary files"] == ["-", "0.64 %", "-"]
    assert told["those of them that have tables"] == ["-", "median 4 % [3 to 6]", "-"]
    assert told["transformers on a GPU (h200): 85 % of capacity"][2] == "P95 7 %, range [2 to 50] over 3 runs"


def test_figures_say_whether_their_aim_is_met(generator):
    runs = {"range": [0.05, 0.12], "held_out": ["a", "b"], "measured_s": {"a": 1.5, "b": 2.5}}
    text = generator.page(
        [
            row("fidelity.live.jct_p50_error", 0.08, target=0.1, details=runs),
            row("fidelity.live.tpot_p50_error", 0.08, target=0.05, details=None),
        ]
    )
    name, value, aim, met = table(text, "Figures and aims")[0]
    assert (value, aim, met) == ("8 %, range [5 to 12] over 2 runs", "10 %", "no interval")
    assert name == "`fidelity.live.jct_p50_error`"
    assert table(text, "Figures and aims")[1][3] == "missed"


def circle(prefix: str, single: float, **more: object) -> dict:
    """A figure of a circle: two loads of two repeats that were held out, and a run that was learnt from."""
    loads = {load: {"calibrated": off, "repeats_spread": 0.04} for load, off in (("a-high", -0.02), ("b-half", 0.09))}
    runs = {"a-high-0": -0.01, "a-high-1": -0.03, "b-half-0": 0.2, "b-half-1": 0.05, "a-static-0": 0.9}
    details = {
        "range": [0.02, 0.09],
        "of_single_runs": single,
        "median_of": {"calibrated": 0.055, "profile": 0.3, "roofline": 0.01},
        "signed_by_load": loads,
        "signed_by_run": {run: {"calibrated": off, "measured_s": 1.5} for run, off in runs.items()},
    }
    return row(f"{prefix}ttft_p50_error", 0.055, target=0.1, details=details, **more)


def test_ranges_are_named_by_what_they_are_over_and_single_runs_make_an_aim_borderline(generator):
    told = {}
    for single in (0.08, 0.12):
        text = generator.page([circle("fidelity.live.", single)])
        told[single] = table(text, "Figures and aims")[0]
        cells = table(text, "A real engine on this machine")[0]
        single_told = f"{100 * single:.3g} %"
        assert cells == ["TTFT P50", "5.5 %", "2 to 9 %", single_told, "1 to 20 %", "4 %", "30 %", "1 %"]
    assert told[0.08][1:] == ["5.5 % (loads 2 to 9; single runs 1 to 20)", "10 %", "no interval"]
    for ci, single, decision in (
        ((0.02, 0.099), 0.08, "met"),
        ((0.02, 0.099), 0.12, "borderline"),
        ((0.02, 0.11), 0.08, "borderline"),
    ):
        text = generator.page([circle("fidelity.live.", single, ci=ci)])
        assert table(text, "Figures and aims")[0][3] == decision


def test_a_figure_that_meets_its_aim_without_an_interval_is_never_called_met(generator):
    rows = [row("calibrate_300_s", 3.0, unit="s", target=60.0), row("profile.x_error", 0.3, target=0.1)]
    assert [cells[3] for cells in table(generator.page(rows), "Figures and aims")] == ["no interval", "missed"]
    text = generator.page([circle("fidelity.live.", 0.08)])
    assert "0 met by every load, 0 by the median alone, 0 borderline, 1 without an interval, 0 missed" in text


def test_an_interval_that_passes_the_aim_makes_it_borderline(generator):
    rows = [row("fidelity.silicon.tables.tpot_median_ape", 0.04, target=0.05, ci=(0.03, 0.06))]
    assert table(generator.page(rows), "Figures and aims")[0][3] == "borderline"


def test_where_it_stands_is_told_by_the_same_runs_of_others(generator):
    def standing(value: float) -> str:
        recorded = row("fidelity.recorded.ttft_mape", value, target=0.02, details={"llmservingsim_mape": 0.02})
        text = generator.page([recorded, circle("fidelity.live_transformers.", 0.06)])
        return text.partition("## Where this stands\n")[2].partition("\n## ")[0]

    assert "is not reached" in standing(0.04)
    assert "| TTFT | 2 % | 4 % | missed by a factor of 2 |" in standing(0.04)
    assert "is reached" in standing(0.01)
    assert "in 1 of 1 metrics the plain roofline is nearer" in standing(0.01)
    assert "No GPU of our own" in standing(0.01)


def test_doubts_and_a_machine_that_is_full_are_told(generator):
    runs = {run: {"span_s": 10.0, "engine_cpu_s": 19.0} for run in ("a-0", "a-1", "a-2")}
    details = {"warnings": {"a-0": ["late"], "a-2": ["late"]}, "runs": runs, "machine": {"cores": 2}}
    text = generator.page([row("fidelity.live.calibration", 3.0, unit="s", details=details)])
    assert "**2 of 3 runs carry doubts**" in text
    assert "took 1.9 s of processor time a second" in text
    assert "which these are was not kept" in text
    for passed, told in (([], "refuses all of them"), (["a-0"], "refuses 1 of them and takes 1 unasked")):
        rows = [row("fidelity.live.calibration", 3.0, unit="s", details=details | {"passed": passed})]
        assert f"`calibrate` {told}" in generator.page(rows)


def test_a_profile_says_its_budget_and_the_tail_of_its_errors(generator):
    operators = {name: {"p95 error": p95} for name, p95 in (("a", 0.1), ("b", 0.12), ("c", 0.3))}
    row_ = row("profile.cv_median_error", 0.04, details={"budget_s": 60.0, "operators": operators})
    told = "- `profile.cv_median_error`: 4 % within a budget of 60 s; P95 by operator: median 12 %, up to 30 %"
    assert told in generator.page([row_])


def test_an_interval_over_few_pairs_is_a_dash(generator):
    by_gpu = {gpu: {"n": 9, "pairs": n, "ci": [0.25, 0.75]} for gpu, n in (("x", 2), ("y", 5))}
    rows = [row("fidelity.brackets.ttft_coverage", 0.8, unit="share", details={"by_gpu": by_gpu})]
    text = generator.runs_page(rows, generator.SECTIONS)
    assert "| x | 9 | 2 | - |" in text
    assert "| y | 9 | 5 | [0.25, 0.75] |" in text


def test_details_are_on_a_page_of_their_own_with_every_number_named(generator):
    details = {"runs": {"one": {"p50": [0.2, 0.1, 0.05, 0.15]}, "two": {"p50": [0.3, 0.2, 0.1, 0.4]}}}
    wide = {f"sort {k}": {f"column {k}": k} for k in range(20)}
    rows = [row("fidelity.calibrated.ttft_mape", 0.1, details=details), row("profile.x", 1.0, details=wide)]
    text = generator.runs_page(rows, generator.SECTIONS)
    assert "runs, one, p50: before 0.2, after 0.1, low 0.05, high 0.15." in text
    assert "sort 3: column 3 3." in text
    assert "before 0.2" not in generator.page(rows)


def test_the_page_can_be_read_and_no_table_is_wide():
    pages = {name: (ROOT / "docs" / name).read_text("utf-8") for name in ("fidelity.md", "fidelity-runs.md")}
    assert len(pages["fidelity.md"]) < 36_000
    lines = [line for text in pages.values() for line in text.splitlines() if line.startswith("|")]
    assert max(line.count("|") for line in lines) <= 15


def test_an_argument_that_is_not_known_writes_nothing(generator, monkeypatch, tmp_path):
    monkeypatch.setattr(generator, "PAGES", (tmp_path / "a.md", tmp_path / "b.md"))
    for words, code in ((["--chekc"], 2), (["--help"], 0)):
        monkeypatch.setattr(sys, "argv", ["generate_fidelity.py", *words])
        with pytest.raises(SystemExit) as ended:
            generator.main()
        assert ended.value.code == code
    assert not list(tmp_path.iterdir())


def test_a_live_aim_is_met_only_where_every_load_meets_it(generator):
    row_ = circle("fidelity.live.", 0.08)
    row_["details"]["signed_by_load"]["a-high"]["calibrated"] = -0.3
    text = generator.page([row_])
    assert table(text, "Figures and aims")[0][3] == "met by the median, 1 of 2 loads"
    assert "0 met by every load, 1 by the median alone" in text
    assert "At 85 % of capacity all 1 medians are told too short (-30 to -30 %)" in text
    assert "| a-high | -30 % |" in text
    assert "| b-half | +9 % |" in text


def test_runs_are_blind_only_where_all_rows_keep_that_code_was_frozen(generator):
    row_ = circle("fidelity.live_transformers.", 0.06)
    seen, form = "this is no blind test", "what looks for dense masks among it"
    assert seen in generator.page([row_])
    assert form not in generator.page([row_])
    row_["details"]["signed_by_load"]["a-high"]["without_masks"] = -0.4
    assert form in generator.page([row_])
    row_["details"]["frozen"] = True
    assert seen not in generator.page([row_])
    assert seen in generator.page([row_, row("fidelity.live_transformers.jct_p50_error", 0.06)])


def test_of_every_engine_it_is_said_whether_its_runs_had_been_seen(generator):
    rows = [circle(f"fidelity.{live}.", 0.06) for live in ("live", "live_transformers")]
    assert generator.page(rows).count("this is no blind test") == 2
    rows[0]["details"]["frozen"] = True
    assert generator.page(rows).count("this is no blind test") == 1


def test_what_masks_are_worth_is_told_only_where_it_was_measured(generator):
    row_ = circle("fidelity.live_transformers.", 0.06)
    assert "calibrated without the term" not in generator.page([row_])
    row_["details"]["signed_by_load"]["a-high"]["without_masks"] = -0.4
    assert "signed errors of -40 to -40 %" in generator.page([row_])
    for of in row_["details"]["signed_by_load"].values():
        of["without_masks"] = of["calibrated"]  # none were taken
    assert "calibrated without the term" not in generator.page([row_])


def missed(name: str, **details: object) -> dict:
    return row(name, 0.3, target=0.1, better="lower", details=details)


def test_a_miss_is_taken_apart_by_what_its_points_are_and_its_cause_is_told_once(generator):
    part = {"p50": 0.2, "bias": -0.1, "points": 50}
    by = {"by_gpu": {"B200": part, "H100": part | {"p50": 0.05}, "A100": part | {"points": 9}}}
    names = ("fidelity.silicon.tables.ttft_median_ape", "fidelity.silicon.tables.tpot_median_ape")
    met = row("fidelity.x_error", 0.05, target=0.1, better="lower", details=by)
    text = "\n".join(generator.misses([missed(names[0], **by), missed(names[1], bias=-0.2), met]))
    assert f"- `{names[0]}`, 30 %: by GPUs H100 5 % (-10.0%), B200 20 % (-10.0%)\n" in text
    assert f"- `{names[1]}`, 30 %: told -20.0% at the median" in text
    assert text.count("waiting in front of the engine") == 1
    assert "A100" not in text
    assert "fidelity.x_error" not in text


def test_loads_and_runs_that_are_missed_stand_beside_their_own_spread_and_beside_others(generator):
    load = {"signed_by_load": {"a-high": {"calibrated": -0.3, "repeats_spread": 0.2}}}
    runs = {"runs": {"x": {"mape": 0.02, "llmservingsim_mape": 0.01}}}
    told = [missed("fidelity.live.jct_p50_error", **load), missed("fidelity.recorded.ttft_mape", **runs)]
    text = "\n".join(generator.misses(told))
    assert "a-high -30.0% where its own repeats lie 20 % apart" in text
    assert "by runs x 2 % (theirs 1 %)" in text
    assert list(generator.misses([])) == []
