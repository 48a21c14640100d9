"""The page on schedules is what the committed results say, calls missed what was missed, and refuses stale words."""

from __future__ import annotations

import importlib
import sys
from functools import partial

import pytest
from documents import ROOT
from generated_pages import by_first, check_committed, imported
from generated_pages import row as any_row

row = partial(any_row, better="higher")


@pytest.fixture(scope="module")
def generator():
    with imported("generate_exegpt") as script:
        yield script


def schedule(rps: float) -> dict:
    return {"words": "RRA, B_E = 4, N_D = 8", "rps": rps, "latency_s": 1.5, "constrained_latency_s": 1.75}


def cell(bound: str, won: str | None, **rps: float) -> dict:
    names = {"rra": "rra", "waa_c": "waa-c", "waa_m": "waa-m"}
    each = {shown: schedule(rps[name]) if name in rps else None for name, shown in names.items()}
    best = max(rps.values(), default=0.0)
    return {
        "bound": bound,
        "bound_s": None if bound == "none" else 2.0,
        "ft": {"rps": 10.0, "batch": 8, "constrained_latency_s": 1.9},
        "strategies": each,
        "won": won,
        "gain": best / 10,
    }


def test_the_page_is_what_the_committed_results_say():
    check_committed("generate_exegpt")


def test_every_aim_of_the_benchmark_stands_on_the_page(generator):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        targets = importlib.import_module("exegpt").TARGETS
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    figures = by_first(generator.page([]), "Figures and aims")
    assert {f"`{name}`" for name in targets} <= set(figures)
    assert {cells[1] for cells in figures.values()} == {"not measured yet"}


def test_a_missed_aim_is_called_so_with_its_reason_and_a_met_one_without(generator):
    rows = [
        row("exegpt.gain_all", 1.5, target=2.9),
        row("exegpt.search_s_max", 1.2, target=2.0, better="lower"),
        row("exegpt.regret_max", 0.001, target=0.02, better="lower"),
        row("exegpt.gain_over_vllm_v1", 0.8, ci=(0.7, 0.9)),
    ]
    figures = by_first(generator.page(rows), "Figures and aims")
    assert figures["`exegpt.gain_all`"][1:4] == ["1.5 times", "at least 2.9 times", "**missed**"]
    assert figures["`exegpt.gain_all`"][4]
    assert figures["`exegpt.search_s_max`"][1:] == ["1.2 s", "at most 2 s", "met", ""]
    assert figures["`exegpt.regret_max`"][1] == "0.1 %"
    assert figures["`exegpt.gain_over_vllm_v1`"][1:4] == ["0.8 times [0.7 times, 0.9 times]", "none", ""]


def test_gains_are_shown_by_bound_with_who_had_them(generator):
    cells = [cell("10 %", "waa-c", rra=12.0, waa_c=20.0), cell("30 %", None), cell("none", "rra", rra=30.0)]
    text = generator.page([row("exegpt.figure.opt-13b-a40.s", 2.5, details={"cells": cells})])
    gains = by_first(text, "Every model and task")
    assert gains["OPT 13B, 4 x A40"] == ["S", "2 WAA-C", "nothing meets it", "3 RRA"]
    shown = text.partition("### OPT 13B, 4 x A40")[2]
    assert "| S | 10 % | 2 | 10 (8) | 12 | 20 | - | 2 | RRA, B_E = 4, N_D = 8 | 1.75 |" in shown
    assert "| S | 30 % | 2 | 10 (8) | - | - | - | - | nothing | - |" in shown


def test_strategies_are_counted_where_both_can_run(generator):
    cells = [cell("10 %", "waa-c", rra=10.0, waa_c=20.0), cell("30 %", "rra", rra=30.0, waa_m=20.0)]
    alone = [cell("10 %", "rra", rra=10.0)]
    text = generator.page(
        [
            row("exegpt.figure.opt-13b-a40.t", 2.5, details={"cells": cells}),
            row("exegpt.figure.gpt-3-341b-a40.t", 1.0, details={"cells": alone}),
        ]
    )
    assert by_first(text, "Who is ahead")["T"] == ["RRA", "2", "1", "1", "1", "GPT-3 341B, 48 x A40"]


def both(rra: float, waa: float, bound: str = "70 %") -> dict:
    return cell(bound, "rra" if rra > waa else "waa-c", rra=rra, waa_c=waa)


def figures_of(**by_task: list[dict]) -> list[dict]:
    """Rows of two models, of which the larger has a cell of WAA; and that it was read literally."""
    large = [
        row(f"exegpt.figure.gpt-3-{model}.s", 2.0, details={"cells": [both(1.0, 2.0)]})
        for model in ("175b-a40", "341b-a40")
    ]
    told = [row(f"exegpt.figure.opt-13b-a40.{task}", 2.0, details={"cells": cells}) for task, cells in by_task.items()]
    literal = row("exegpt.lockstep.waa_ahead", 0.5, details={"by_task": {"s": {"waa_ahead": 1, "cells": 2}}})
    return [*large, *told, literal]


def test_words_on_who_leads_are_counted_and_refused_where_numbers_say_otherwise(generator):
    loose = [both(1.0, 2.0), both(2.0, 1.0, "none")]
    assert "in 1 of 2 cells at 70 % and without one" in generator.page(figures_of(t=loose))
    with pytest.raises(ValueError, match="WAA often leads on T"):
        generator.page(figures_of(t=[both(2.0, 1.0)] * 4))
    with pytest.raises(ValueError, match="tight bounds on long outputs"):
        generator.page(figures_of(t=[*loose, both(2.0, 1.0, "10 %")]))


def test_without_a_bound_the_choice_is_named_as_it_is(generator):
    def bound(name: str, rps: float, latency_s: float) -> dict:
        theirs = schedule(rps) | {"latency_s": latency_s}
        paper = {"words": "other", "rps": rps, "latency_s": 2.0 if name[0] in "35" else latency_s}
        won = {"rra": schedule(30.0), "waa-c": schedule(31.0) | {"words": "WAA-C, so"}, "waa-m": None}
        told = {"paper": paper, "their_schedule": theirs, "their_schedule_as_they_count": theirs}
        return row(f"exegpt.table6.{name}", 31.0, details=told | {"choice": won["waa-c"], "strategies": won})

    rows = [bound("3.1s", 20.0, 1.5), bound("5.9s", 21.0, 1.6), bound("11.5s", 24.0, 8.0)]
    rows += [bound("none", 25.0, 9.0), row("exegpt.table6.kept_at_tightest", 0.95)]
    text = generator.page(rows)
    assert "WAA-C, so has 31 requests a second, RRA at best 30." in text
    assert "the latency 20 % to 25 % lower" in text
    assert "(the paper's text says 80 %, its Table 6 has 80 %)" in text


@pytest.mark.parametrize("most", [0.98, 1.94])
def test_shares_of_points_are_told_by_strategy(generator, most):
    def of(value, evaluated, points):
        more = {"evaluated": evaluated, "points": points, "of": "opt-13b-a40, s, bound none"}
        return {"value": value, "median": value / 2} | more

    shares = {"rra": of(0.005, 500, 100_000), "waa-c": of(most, round(1000 * most), 1000)}
    told = {"of": "opt-13b-a40, s, bound none", "by_strategy": shares}
    rows = [row("exegpt.points_share_max", 0.01, details=told)]
    rows.append(row("exegpt.search_s_max", 1.2, details={"of": "opt-13b-a40, s, bound none", "choices": []}))
    text = generator.page(rows)
    assert "RRA 0.5 % (500 of 100,000; opt-13b-a40, s, bound none), in the middle 0.25 %" in text
    assert f"WAA-C {100 * most:.3g} % ({round(1000 * most):,} of 1,000" in text
    assert ("More than all" in text) == (most > 1)


def test_looking_at_all_is_over_the_searchs_micro_batches(generator):
    from lengthwise.schedule.search_space import MICRO_BATCHES

    of_list = ", ".join(map(str, MICRO_BATCHES))
    assert of_list in generator.page([])
    assert of_list in (ROOT / "docs/decisions/0017-choice-of-schedule.md").read_text("utf-8")


def played(name: str, configurations: int) -> dict:
    one = {
        "bound": "none", "exegpt": schedule(4.0), "exegpt_in_replicas": None, "systems": {}, "as_cut_for_ft": {},
    }  # fmt: skip
    return row(f"exegpt.systems.{name}", 1.0, details={"cells": [one], "configurations": {"vllm-v1": configurations}})


def test_scenarios_that_were_not_played_out_are_named_with_the_reason(generator):
    tasks = ("s", "t", "g", "c1", "c2")
    models = ("t5-11b-a40", "opt-13b-a40", "gpt-3-39b-a40", "gpt-3-101b-a100")
    wide = ("gpt-3-175b-a40", "gpt-3-175b-a100", "gpt-3-341b-a40")
    every = [f"{model}.{task}" for model in (*models, *wide) for task in tasks if (model, task) != ("t5-11b-a40", "c2")]
    assert len(every) == 34
    some = [name for name in every if not name.startswith(("gpt-3-175b-a40", "gpt-3-341b")) and name != "opt-13b-a40.g"]
    text = generator.page([played(name, 900 + 10 * i) for i, name in enumerate(some)])
    assert (
        "**11 of the 34 scenarios, a model and a task each, are not played out**: OPT 13B, 4 x A40: G; GPT-3 175B"
        in text
    )
    assert "GPT-3 341B, 48 x A40: S, T, G, C1, C2. The reason is time" in text
    assert "(900 to 1,120 configurations of the systems each)" in text
    assert "The longest pipelines (32 and 48 GPUs) are not in these means" in text
    text = generator.page([played(name, 900) for name in every])
    assert "All 34 scenarios, a model and a task each, were played out" in text
    assert "not played out" not in text
