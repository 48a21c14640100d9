from __future__ import annotations

import dataclasses
import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from lengthwise.report import search_table
from lengthwise.report.search_text import axis_labels, in_order, metric_name, metric_text, nearest_misses, setting_text
from lengthwise.schema.errors import InputError
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.metric_names import metric_of
from lengthwise.schema.plan import Limit, Objective, Shift, Study, limit_text


def printed(study, width: int = 100, **options) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(search_table(study, **options))
    return out.getvalue()


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("width", [80, 100])
def test_the_question_the_ranking_and_the_reasons_fit(studies, width) -> None:
    study = studies.study(plans=1)
    text = printed(study, width)
    assert all(len(line) <= width for line in text.splitlines())
    plan = study.plans[0]
    best, message = plan.best, flat(text)
    assert "chat: toy-7b; chat <i>&</i>; TTFT p90 ≤ 2 s, TBT p99 ≤ 80 ms; Requests per dollar" in message
    assert f"{best.objective.value:,.0f} ± 9".replace(" ", "\N{NO-BREAK SPACE}") in text or "± 9" in message
    kind = f"{best.gpus} \N{MULTIPLICATION SIGN} {best.settings['deployment.gpu']}"
    assert f"Best: {best.name} ({kind}) \N{MIDDLE DOT} It needs the fewest GPUs for a rate." in message
    assert "Decoding reads the weights: bound by memory bandwidth." in message
    assert "4 \N{MULTIPLICATION SIGN} weights do not fit: the weights need 61.2 GB" in message
    assert "16 candidates: 10 ranked or scouted, 2 pruned (12 %), 4 rejected; 10 of them simulated." in message
    assert "214 simulations of 1,200,000 requests in 34.2 s. 3 evaluations came" in message


def test_a_best_configuration_of_several_kinds_has_its_number_of_gpus(studies) -> None:
    study = studies.study(plans=1)
    first, *others = study.plans[0].choices
    mixed = replace(first, settings={"deployment.groups": '[{"gpu": "a"}, {"gpu": "b"}]'})
    study = replace(study, plans=(replace(study.plans[0], choices=(mixed, *others)),))
    assert f"Best: {first.name} ({first.gpus} GPUs)" in flat(printed(study, 100))


def test_a_limit_that_binds_far_below_its_bound_is_explained_with_the_rate_of_its_value(studies) -> None:
    """A metric may jump at saturation: half of its bound at the operating point, above it at the next rate."""
    study = studies.study(plans=1)
    plan = study.plans[0]
    first = plan.choices[0]
    half = {name: Estimate(one.value / 2) for name, one in first.at.values.items()}
    choices = (replace(first, at=replace(first.at, values=half)), *plan.choices[1:])
    lines = printed(replace(study, plans=(replace(plan, choices=choices),)), 160).splitlines()
    limit = next(one for one in plan.limits if one.metric == first.bottleneck.binds)
    value = metric_text(limit.metric, half[limit.metric].value)
    (reason,) = [line for line in lines if line.startswith("Bottleneck: Bound by")]
    assert f"({value} at {first.at.rate_rps:.2f} requests/s, limit {metric_text(limit.metric, limit.bound)})" in reason
    assert "which jumps past its bound at a higher rate" in reason


def test_hit_rates_are_a_column_where_a_cache_has_some(studies) -> None:
    plain = studies.study(plans=1)
    text = printed(studies.cached(plain, hit_rate=0.8123, loaded_share=0.25), 160)
    row = next(line for line in text.splitlines() if plain.plans[0].best.name in line)
    assert [cell.strip() for cell in row.split("│")[-3:-1]] == ["81.2", "25.0"]
    assert "cached: share of the prompt tokens in the prefix cache. loaded: from CPU memory behind it." in flat(text)
    assert "loaded" not in printed(studies.cached(plain, hit_rate=0.8), 160)
    assert "cached" not in printed(plain, 160)


def test_the_cost_models_error_and_notes_are_shown(studies) -> None:
    study = studies.study(plans=1)
    plan = study.plans[0]
    objective = Estimate(4000.0, 20.0, 3200.0, 4700.0)
    best = plan.choices[0]
    ttft = plan.limits[0].metric
    at = replace(best.at, values={**best.at.values, ttft: Estimate(1.32, 0.02, 1.1, 1.7)})
    choices = (replace(best, objective=objective, at=at), *plan.choices[1:])
    shifts = (Shift(ttft, plan.limits[0].bound, best.name, 4000.0, 3200.0, 4700.0),)
    note = "No kernels were measured on L4."
    text = printed(replace(study, plans=(replace(plan, choices=choices, notes=(note,), shifts=shifts),)), 100)
    assert text.count("(3,200\N{EN DASH}4,700)") == 2, "in the ranking, and under another bound"
    assert "(1.1\N{EN DASH}1.7)" in text
    assert "(...): 90 % intervals of the cost model's error." in flat(text)
    assert note in flat(text)
    assert all(len(line) <= 100 for line in text.splitlines())


def test_ranks_ties_scouts_and_what_binds_are_marked(studies) -> None:
    study = studies.study(plans=1)
    lines = [line for line in printed(study, 160).splitlines() if line.startswith("│")]
    ranks = [line.split("│")[1].strip() for line in lines]
    assert [rank for rank in ranks if rank not in {"", "#"}] == ["=1", "=1", "3", "4", "5", "6", "7", "8", "~", "~"]
    heads = {"throughput": 6, "ttft.p90": 7, "tbt.p99": 8}
    for choice in study.plans[0].choices[:10]:
        row = next(line for line in lines if f" {choice.name} " in line)
        assert [i for i, cell in enumerate(row.split("│")) if "*" in cell] == [heads[choice.bottleneck.binds]]
    assert len({choice.bottleneck.binds for choice in study.plans[0].choices[:10]}) > 1
    assert "Columns of limits show the metrics at the lower end of the interval of req/s." in flat(printed(study, 160))


def test_only_the_top_is_listed_and_the_rest_counted(studies) -> None:
    text = printed(studies.study(plans=1), 160, top=3)
    assert "7 more ranked or scouted." in text
    assert "known roughly" not in text
    assert studies.study(plans=1).plans[0].choices[3].name not in text


def test_an_infeasible_search_names_the_nearest_misses(studies) -> None:
    plan = studies.plan("hard", (0.1, 0.01))
    text = flat(printed(Study("x", (plan,))))
    assert "No tried configuration meets the limits." in text
    misses = nearest_misses(plan)
    assert [m.factor for m in misses] == sorted(m.factor for m in misses)
    near = misses[0]
    assert near.factor == pytest.approx(near.point.value(near.limit.metric) / near.limit.bound)
    assert f"Nearest: {near.choice.name}" in text
    assert "10 \N{MULTIPLICATION SIGN} latency at any rate: breaks TTFT p90 at any rate" in text


def test_several_plans_show_what_confusing_them_costs(studies) -> None:
    text = printed(studies.study())
    assert "summaries: toy-7b" in text
    after = text[text.index("Times worse") :]
    assert "1.31 \N{MULTIPLICATION SIGN}" in after
    assert "fails" in after
    assert "Times worse" not in printed(studies.study(plans=1))


def test_names_are_not_markup(studies) -> None:
    plan = studies.study(plans=1).plans[0]
    odd = dataclasses.replace(plan.choices[0], name="[red]a[/red]")
    made = dataclasses.replace(plan, name="[b]p", choices=(odd, *plan.choices[1:]))
    text = printed(Study("x", (made,)))
    assert "[red]a[/red]" in text
    assert "[b]p: " in text


def test_more_limits_than_columns_are_named_below(studies) -> None:
    plan = studies.study(plans=1).plans[0]
    more = (*plan.limits, Limit("jct.mean", 40.0), Limit("within_slo", 0.5, at_least=True))
    text = printed(Study("x", (dataclasses.replace(plan, limits=more),)))
    assert all(len(line) <= 100 for line in text.splitlines())
    assert "Also met: Within SLO ≥ 50 %." in text


def test_a_study_needs_a_plan_and_unique_names(studies) -> None:
    plan = studies.study(plans=1).plans[0]
    with pytest.raises(InputError, match="at least one plan"):
        search_table(Study("x", ()))
    with pytest.raises(InputError, match="used twice: chat"):
        search_table(Study("x", (plan, plan)))
    twice = dataclasses.replace(plan, choices=(plan.choices[0], plan.choices[0]))
    with pytest.raises(InputError, match="unique keys"):
        search_table(Study("x", (twice,)))


def test_metrics_have_names_units_and_an_order() -> None:
    assert metric_text("ttft.p90", 0.312) == "312 ms"
    assert metric_text("jct.mean", 12.0) == "12.0 s"
    assert metric_text("within_slo", 0.981) == "98.1 %"
    assert metric_text("odd_one", math.nan) == "\N{EN DASH}"
    assert metric_of("odd_one").label == "odd one"
    names = ["mfu", "tbt.p99", "zeta", "ttft.p99", "ttft.p9999", "within_slo", "ttft.mean"]
    assert in_order(names) == ["ttft.mean", "ttft.p99", "ttft.p9999", "tbt.p99", "within_slo", "mfu", "zeta"]
    assert limit_text(Limit("kv_utilization", 0.9)) == "KV cache in use ≤ 90 %"
    assert metric_name("throughput") == "queue growth"


def test_axes_have_short_labels_unless_two_would_be_the_same() -> None:
    assert axis_labels(["deployment.tp", "scheduler.rank"]) == {
        "deployment.tp": "Tensor parallel",
        "scheduler.rank": "Rank",
    }
    caches = ("engine.enable_prefix_caching", "engine.prefix_cache", "engine.kv_offloading.size_gb")
    assert list(axis_labels(caches).values()) == ["Prefix cache", "Prefix cache's rules", "CPU memory, GB"]
    assert axis_labels(["a.tp", "b.tp"]) == {"a.tp": "a.tp", "b.tp": "b.tp"}
    assert [setting_text(v) for v in (True, 0.5, (1, 2), {"a": 1.0}, None)] == [*("yes", "0.5", "1, 2", "a 1", "None")]


def test_without_capacities_there_is_no_capacity_column(studies) -> None:
    plan = studies.study(plans=1).plans[0]
    bare = tuple(dataclasses.replace(c, capacity_rps=Estimate(math.nan)) for c in plan.choices)
    assert "req/s" in printed(Study("x", (plan,)))
    assert "req/s" not in printed(Study("x", (dataclasses.replace(plan, choices=bare),)))


def test_costs_that_are_exact_have_no_interval_and_a_column_of_their_own(studies) -> None:
    plan = studies.study(plans=1).plans[0]
    cost = Objective("cost_at_rate", "cost at the rate", "$/h", higher_is_better=False)
    exact = tuple(
        dataclasses.replace(c, objective=Estimate(c.price_per_hour_usd, 0.0), capacity_rps=Estimate(math.nan))
        for c in plan.choices
    )
    made = dataclasses.replace(plan, objective=cost, choices=exact)
    head, rows = printed(Study("x", (made,)), 160).split("├", 1)
    assert head.count("$/h") == 1
    assert head.count("cost at the rate") == 2
    costs = [line.split("│")[5] for line in rows.splitlines() if line.startswith("│")]
    assert any(cost.strip() for cost in costs)
    assert "±" not in "".join(costs)
