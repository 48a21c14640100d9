"""The cost model's error in capacities, rankings and frontiers: common errors cancel, others tie."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace

import numpy as np
import pytest
from market import THREE, TTFT, Build, Chat, ask, bench, question

from lengthwise.cost.model_error import comparable_deployments
from lengthwise.schema.cost_tables import PartError
from lengthwise.schema.estimate import DrawnEstimate, Estimate
from lengthwise.schema.plan import Choice, Limit, Status
from lengthwise.search.capacity_search import Capacity, Effort, scout, with_model_error
from lengthwise.search.configuration_search import advantages, in_order, losses, separated
from lengthwise.search.limits import SloLimits
from lengthwise.search.load import Load
from lengthwise.search.space import Space
from lengthwise.search.store import from_dict, to_dict
from lengthwise.statistics import drawn_estimate

compiled = pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="slow without the compiler")
TWO_GPUS = Space({"deployment.gpu": ("A100-80GB", "H100"), "engine.max_num_seqs": (16, 64)})
SEEDLESS = [("a", 100.0), ("b", 99.998), ("c", 60.0)]
ERRORS = np.exp(0.15 * np.linspace(-1.6, 1.6, 16))


def drawn(value: float, gpu: str, errors: np.ndarray = ERRORS) -> Choice:
    objective = drawn_estimate(Estimate(value, 0.01 * value), [1.0, *errors])
    return Choice(f"{value} {gpu}", "", {"deployment.gpu": gpu}, 1, 1.0, Status.RANKED, objective=objective)


def test_common_errors_cancel_and_others_tie() -> None:
    best, same, other = drawn(100.0, "H100"), drawn(90.0, "H100"), drawn(85.0, "A100", ERRORS[::-1])
    assert separated(best, same, question())
    assert not separated(best, other, question())
    assert separated(best, drawn(40.0, "A100"), question())
    assert not separated(best, drawn(99.0, "H100"), question()), "the sampling intervals overlap"


def test_the_interval_of_a_loss_holds_less_error_on_common_hardware_than_on_others() -> None:
    best = drawn(100.0, "H100")
    low, high = losses(best, drawn(90.0, "H100"), question())
    assert 10 * ERRORS.min() - 1.9 <= low < 10 < high <= 10 * ERRORS.max() + 1.9, "draws scale the difference alone"
    wide = losses(best, drawn(90.0, "A100"), question())
    assert wide[0] < low
    assert wide[1] > high


def test_a_tie_of_other_hardware_precedes_a_better_value_that_is_not_tied() -> None:
    best, wide, narrow = drawn(100.0, "H100", np.ones(16)), drawn(85.0, "L40S"), drawn(88.0, "A40", np.ones(16))
    assert [separated(best, c, question()) for c in (wide, narrow)] == [False, True]
    [text] = advantages([best, wide, narrow], {"deployment.gpu": ("H100", "L40S", "A40")}, question())
    assert text.endswith("does not differ significantly.")


def test_of_choices_with_as_few_gpus_the_cheapest_comes_first() -> None:
    dear, cheap = (
        Choice(gpu, gpu, {"deployment.gpu": gpu}, 1, usd, Status.RANKED, objective=Estimate(1.0))
        for gpu, usd in (("H100", 3.29), ("L40S", 1.5))
    )
    assert in_order([dear, cheap], question("fewest_gpus", rate_rps=1.0)) == [cheap, dear]


def test_a_single_seed_separates_no_small_difference() -> None:
    first, near, far = (Choice(name, "", {}, 1, 1.0, Status.RANKED, objective=Estimate(v)) for name, v in SEEDLESS)
    assert not separated(first, near, question())
    assert separated(first, far, question())


def test_advantages_have_no_loss_of_zero_and_count_whole_gpus() -> None:
    axes = {"engine.max_num_seqs": (16, 64)}

    def sentence(name: str, best: Estimate, other: Estimate) -> str:
        pairs = ((16, best), (64, other))
        made = [
            Choice(str(n), str(n), {"engine.max_num_seqs": n}, 1, 1.0, Status.RANKED, objective=e) for n, e in pairs
        ]
        [text] = advantages(made, axes, question(name, rate_rps=1.0))
        return text.partition("another value, 64, ")[2]

    dollars, gpus = "requests_per_dollar", "fewest_gpus"
    assert sentence(dollars, Estimate(100.0), Estimate(99.998)) == "does not differ significantly."
    assert sentence(dollars, Estimate(100.0, 1e-4), Estimate(99.998, 1e-4)) == "differs by less than 0.5%."
    assert sentence(dollars, Estimate(100.0), Estimate(60.0)) == "has 40% fewer requests per dollar."
    assert sentence(dollars, Estimate(100.0, 1.0), Estimate(60.0, 1.0)) == (
        "has 40% (38% to 42%) fewer requests per dollar."
    )
    assert "to 100%) fewer" in sentence(dollars, Estimate(100.0, 30.0), Estimate(15.0, 20.0)), (
        "nothing has less than none"
    )
    assert sentence(gpus, Estimate(4.0, 0.0), Estimate(5.0, 0.0)) == "takes 1 more GPU."
    assert sentence(gpus, Estimate(4.0, 0.0), Estimate(8.0, 0.0)) == "takes 4 more GPUs."
    drawn_gpus = [
        DrawnEstimate(best, 0.0, 4.0, 8.0, draws=(best, *[best + 4 * (k % 2) for k in range(15)]))
        for best in (4.0, 12.0)
    ]
    assert sentence(gpus, drawn_gpus[0], replace(drawn_gpus[1], draws=(12.0,) * 16)) == "takes 8 (4 to 8) more GPUs."


def test_less_is_better_for_costs() -> None:
    requested = question("cost_at_rate", rate_rps=1.0)
    assert separated(drawn(90.0, "H100"), drawn(100.0, "H100"), requested)
    assert not separated(drawn(90.0, "H100"), drawn(100.0, "A100"), requested)


def test_an_interval_may_be_infinite_and_moves_with_its_estimate() -> None:
    one = drawn_estimate(Estimate(2.0, 0.1), [1.0, 0.8, 0.9, 1.1, math.inf])
    assert (one.value, one.half_width, one.model_high) == (2.0, 0.1, math.inf)
    assert one.model_low == pytest.approx(1.6)
    assert one.scaled(10.0).draws == pytest.approx((16.0, 18.0, 22.0, math.inf))
    assert not drawn_estimate(Estimate(2.0), [1.0, math.nan]).has_model_interval


def test_deployments_of_a_model_on_one_gpu_have_the_same_errors_in_a_draw() -> None:
    errors = (PartError("layer", 0.2), PartError("comm", 0.2))

    def layer_factors(**settings) -> np.ndarray:
        deployment = Build()({f"deployment.{key}": value for key, value in settings.items()})
        cost = deployment.cost
        deployment = replace(deployment, cost=replace(cost, evidence=replace(cost.evidence, errors=errors)))
        plain, *perturbed = comparable_deployments(deployment)
        return np.array([float(one.cost.layer_s.max() / plain.cost.layer_s.max()) for one in perturbed])

    assert layer_factors(gpu="H100", tp=1) == pytest.approx(layer_factors(gpu="H100", tp=2))
    assert abs(np.corrcoef(layer_factors(gpu="H100"), layer_factors(gpu="A100-80GB"))[0, 1]) < 0.9


@compiled
def test_a_capacity_carries_the_error_of_the_step_time() -> None:
    deployment = Build()({})
    cost = deployment.cost
    deployment = replace(
        deployment, cost=replace(cost, evidence=replace(cost.evidence, errors=(PartError("step", 0.1),)))
    )
    load, slo = Load(Chat(), "chat"), SloLimits((Limit("queueing_delay.p99", 5.0),))
    found: Capacity = replace(scout(deployment, load, slo), effort=Effort())
    rate = with_model_error(found, deployment, load, slo, draws=16).rate_rps
    assert rate.value == found.rate_rps.value
    assert math.log(rate.model_high / rate.model_low) == pytest.approx(2 * 1.645 * 0.1, rel=0.35)
    assert found.effort.simulations > 17
    assert not with_model_error(found, deployment, load, slo, draws=0).rate_rps.has_model_interval


@pytest.mark.slow
@compiled
def test_a_search_carries_it_everywhere_and_ranks_the_best_of_each_gpu() -> None:
    options = replace(THREE, top=1)
    plan = ask(bench(question(model_draws=16)), TWO_GPUS, options)
    ranked = [choice for choice in plan.choices if choice.status is Status.RANKED]
    assert {choice.settings["deployment.gpu"] for choice in ranked} == {"A100-80GB", "H100"}
    assert plan.tied == 2, "no model that is off by a fifth separates the two GPUs"
    for choice in ranked:
        assert choice.objective.model_low < choice.objective.value < choice.objective.model_high
        assert choice.capacity_rps.has_model_interval
        assert choice.at.values[TTFT.metric].model_high > choice.at.value(TTFT.metric)
        cost = choice.at.values["usd_per_million_output_tokens"]
        assert cost.model_low < cost.value < cost.model_high
        assert repr(from_dict(to_dict(choice))) == repr(choice)
        assert isinstance(choice.objective, DrawnEstimate)
    names = {choice.name for choice in ranked}
    assert any(trade.choice in names for trade in plan.frontiers[TTFT.metric])
    for trade in plan.frontiers[TTFT.metric]:
        assert trade.choice not in names or trade.latency.has_model_interval
    assert "does not differ significantly" in plan.reasons[0]
    assert re.search(r"has \d+% \(\d+% to \d+%\) fewer requests per dollar", plan.reasons[1]), plan.reasons


@pytest.mark.slow
@compiled
def test_the_number_of_gpus_for_a_rate_carries_it() -> None:
    space = Space({"deployment.gpu": ("A100-80GB",), "engine.max_num_seqs": (8, 64)})
    best = ask(bench(question("fewest_gpus", rate_rps=40.0, model_draws=16)), space).best
    low, high = best.objective.model_low, best.objective.model_high
    assert low < high
    assert low == int(low), "replicas are complete"
    assert high == int(high)
    assert best.settings["deployment.replicas"] == best.gpus
    assert best.name == f"x{best.gpus} b64", "the name tells how many replicas it takes"
