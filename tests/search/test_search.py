"""A search finds what an exhaustive search finds, whatever its workers and whatever was kept."""

from __future__ import annotations

import itertools
import math
import os
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from market import SMALL, THREE, TTFT, Build, Chat, ask, bench, question

from lengthwise.schema.estimate import Estimate
from lengthwise.schema.plan import Choice, Limit, Shift, Status
from lengthwise.search import workers
from lengthwise.search.configuration_search import Options, advantages, monotone
from lengthwise.search.limits import OBJECTIVES, Question
from lengthwise.search.space import Space
from lengthwise.search.store import Store

pytestmark = pytest.mark.skipif(
    os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="millions of requests take hours without the compiler"
)

MIN_COUNT = Space({"deployment.gpu": ("A100-80GB", "H100"), "engine.max_num_seqs": (16, 64)})
TIGHT, LOOSE = (Limit("ttft.p90", 0.3),), (Limit("ttft.p90", 4.0), Limit("queueing_delay.p99", 2.0))
GAPS = (Limit("tbt.p99", 0.03), Limit("queueing_delay.p99", 1.0))
STRICT = (Limit("ttft.p99", 0.25), Limit("tbt.p99", 0.05))


def reported(plan):
    """All of a plan but what it took; NaN is no equal of itself."""
    return repr(replace(plan, effort=None))


def by_key(plan):
    return {choice.key: choice for choice in plan.choices}


def check_nothing_is_lost(requested, draw, top, space=SMALL):
    """The pruned search's best is among the best of all, and no choice that it left out is better."""
    own = ask(bench(requested, draw), space)
    complete = ask(bench(requested, draw), space, Options(top, exhaustive=True, sensitivity=False))
    assert complete.effort.pruned == 0
    if complete.best is None:
        assert own.best is None
        return own, complete
    assert own.best.key in [choice.key for choice in complete.choices[: complete.tied]]
    reached = own.best.objective
    for key, choice in by_key(own).items():
        full = by_key(complete)[key]
        if choice.status is Status.PRUNED and full.status in (Status.RANKED, Status.SCOUTED):
            half = full.objective.half_width if full.status is Status.RANKED else 0.0
            assert full.objective.value - half <= reached.value + reached.half_width
            assert choice.simulations or full.objective.value - half <= choice.bounds.objective, "a bound is no bound"
    return own, complete


@pytest.mark.slow
@pytest.mark.parametrize("limits", [TIGHT, LOOSE, STRICT])
def test_pruning_loses_nothing(limits):
    own, complete = check_nothing_is_lost(question("requests_per_dollar", *limits), Chat(), 3)
    assert own.effort.requests < complete.effort.requests
    assert own.effort.pruned > 0


@pytest.mark.slow  # minutes of searches of everything
@pytest.mark.parametrize("lengths", [(800, 60), (200, 150), (1500, 20)])
@pytest.mark.parametrize("limits", [TIGHT, LOOSE, GAPS, STRICT])
def test_nor_on_other_workloads(limits, lengths):
    draw, posted = Chat(*lengths, offset=lengths[0]), question("requests_per_dollar", *limits)
    space = replace(SMALL, axes=SMALL.axes | {"deployment.model": ("llama-3-8b", "qwen2.5-14b")})
    check_nothing_is_lost(posted, draw, 8, space)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cost_at_rate", "energy"])
def test_pruning_loses_nothing_where_less_is_better(name):
    posted = question(name, TTFT, rate_rps=6.0)
    own = ask(bench(posted))
    complete = ask(bench(posted), options=Options(6, exhaustive=True, sensitivity=False))
    assert own.best.objective.value <= complete.best.objective.value * (1 + 1e-9)


@pytest.mark.slow
def test_the_plan_is_the_same_for_any_workers(sent):
    posted = bench(question())
    plans = [ask(posted, MIN_COUNT)]
    with workers.threads(2) as two:
        plans.append(ask(posted, MIN_COUNT, worker_pool=two))
    with workers.processes(2) as two:
        plans.append(ask(posted, MIN_COUNT, worker_pool=two))
    assert len({reported(plan) for plan in plans}) == 1
    assert len({(plan.effort.simulations, plan.effort.requests) for plan in plans}) == 1


def test_a_store_gives_the_same_plan_and_simulates_nothing_again(tmp_path):
    posted = bench(question())
    with Store.open(tmp_path) as store:
        first = ask(posted, MIN_COUNT, store=store, identity="a")
        retained = len(store)
        again = ask(posted, MIN_COUNT, store=store, identity="a")
        assert reported(again) == reported(first)
        assert first.effort.reused == 0
        assert again.effort.reused == retained == len(store)
        assert again.effort.simulations == first.effort.simulations, "what it took, whenever that was"


@pytest.mark.slow
def test_a_store_of_another_question_is_not_read(tmp_path):
    with Store.open(tmp_path) as store:
        ask(bench(question()), MIN_COUNT, store=store, identity="a")
        other = bench(question("requests_per_dollar", *TIGHT))
        assert ask(other, MIN_COUNT, store=store, identity="b").effort.reused == 0
        assert reported(ask(other, MIN_COUNT, store=store, identity="b")) == reported(ask(other, MIN_COUNT))


@pytest.mark.slow
def test_results_stored_before_an_interrupted_search_are_used(tmp_path):
    posted = bench(question())

    def stop(step, done, _):
        if step == "rank" and done:
            raise KeyboardInterrupt

    with Store.open(tmp_path) as store:
        with pytest.raises(KeyboardInterrupt):
            ask(posted, MIN_COUNT, store=store, progress=stop)
        retained = len(store)
        assert retained > 4
        plan = ask(posted, MIN_COUNT, store=store)
        assert plan.effort.reused == retained
        assert reported(plan) == reported(ask(posted, MIN_COUNT))


def test_choices_stand_in_order_and_add_up():
    plan = ask(bench(question()))
    standings = [choice.status for choice in plan.choices]
    assert standings == sorted(standings, key=list(Status).index)
    assert plan.best is plan.choices[0]
    for standing in (Status.RANKED, Status.SCOUTED):
        values = [choice.objective.value for choice in plan.choices if choice.status is standing]
        assert values == sorted(values, reverse=True)
    assert plan.effort.candidates == len(plan.choices) == len(SMALL)
    assert plan.effort.pruned == standings.count(Status.PRUNED)
    assert plan.effort.simulations == sum(choice.simulations for choice in plan.choices)
    assert plan.effort.requests == sum(choice.requests for choice in plan.choices)
    assert sum(group.count for group in plan.excluded_groups) == plan.effort.pruned + plan.effort.rejected
    assert 1 <= plan.tied <= 3
    for choice in plan.choices:
        assert choice.status is not Status.RANKED or choice.at.satisfied
        assert not (choice.objective.value > choice.bounds.objective)
        assert (choice.exclusion.reason == "") == (choice.status in (Status.RANKED, Status.SCOUTED))


def test_what_cannot_be_is_rejected_with_its_reason():
    space = Space({"deployment.model": ("llama-3-8b", "llama-3-70b"), "deployment.gpu": ("L4", "H100")})
    limits = (TTFT, Limit("tbt.p99", 0.025))
    plan = ask(bench(question("requests_per_dollar", *limits)), space)
    reasons = {(c.settings["deployment.model"], c.settings["deployment.gpu"]): c for c in plan.choices}
    for gpu in ("L4", "H100"):
        assert reasons["llama-3-70b", gpu].status is Status.REJECTED
        assert reasons["llama-3-70b", gpu].exclusion.group == "does not fit in memory"
    slow = reasons["llama-3-8b", "L4"]
    group = "breaks TBT p99 ≤ 25 ms even without other requests"
    assert (slow.status, slow.exclusion.group) == (Status.REJECTED, group)
    assert re.fullmatch(r"TBT p99 is at least [\d.]+ ms without .*; the limit is 25 ms", slow.exclusion.reason)
    assert plan.best.settings["deployment.gpu"] == "H100"


EXCESS = r"([\d.]+ % of the (requests exceed a|times between tokens are above) .* \([\d.]+ % may\)|the queue grows)"
PRUNED = (
    r"at most [\d.e+]+ req/\$ even if no request waited; 3 others have [\d.e+]+ or better",
    EXCESS + r" at [\d.e-]+ requests/s, which are [\d.e+]+ req/\$; the best reach more within the limits",
)


@pytest.mark.slow
def test_exclusions_have_the_numbers_that_led_to_them():
    plan = ask(bench(question("requests_per_dollar", *TIGHT)))
    reasons = [c.exclusion.reason for c in plan.choices if c.status is Status.PRUNED]
    assert reasons
    assert all(any(re.fullmatch(known, reason) for known in PRUNED) for reason in reasons), reasons
    strict = ask(bench(question("requests_per_dollar", Limit("ttft.p90", 0.06))), MIN_COUNT)
    rejected = [c.exclusion.reason for c in strict.choices if c.status is Status.REJECTED]
    idle = r"TTFT p90 is at least [\d.]+ ms without other requests; the limit is 60 ms"
    lowest = EXCESS + r" at [\d.e-]+ requests/s, the lowest rate tried"
    assert all(re.fullmatch(f"{idle}|{lowest}", reason) for reason in rejected), rejected


def test_settings_are_compared_on_the_same_hardware():
    def choice(gpu: str, tp: int, value: float) -> Choice:
        settings = {"deployment.gpu": gpu, "deployment.tp": tp}
        name, objective = f"{gpu} tp{tp}", Estimate(value, 1.0)
        return Choice(name, name, settings, tp, 1.0, Status.RANKED, objective=objective)

    choices = [choice("H100", 2, 100.0), choice("H200", 4, 99.5), choice("H100", 4, 60.0)]
    axes = {"deployment.gpu": ("H100", "H200"), "deployment.tp": (2, 4)}
    gpu, tp = advantages(choices, axes, question())
    assert gpu == "gpu = H100: the best configuration with another value, H200 tp4, does not differ significantly."
    assert tp.startswith("tp = 2: the best configuration with another value on H100, H100 tp4, has 40% (38% to 42%)")
    assert len(advantages(choices[:2], axes, question())) == 1  # no other tp ran on an H100


def test_without_a_feasible_choice_there_is_no_best():
    plan = ask(bench(question("requests_per_dollar", Limit("ttft.p90", 1e-3))), MIN_COUNT)
    assert plan.best is None
    assert plan.effort.rejected == plan.effort.candidates
    assert plan.tied == 0
    assert plan.reasons == ()
    assert not any(plan.frontiers.values())


@pytest.mark.slow
def test_no_deployment_takes_more_gpus_than_available():
    space = Space({"deployment.tp": (1, 2, 4), "deployment.replicas": (1, 2, "fill")})
    plan = ask(bench(question(max_gpus=4)), space)
    for choice in plan.choices:
        fits = choice.gpus <= 4
        assert fits == (choice.status is not Status.REJECTED)
        if choice.settings["deployment.replicas"] == "fill":
            assert choice.gpus == 4
    assert [c.exclusion.group for c in plan.choices if c.gpus > 4] == ["takes more than 4 GPUs"]


@pytest.mark.slow
def test_other_bounds_of_a_limit_are_reported_and_the_requested_one_gives_the_best():
    plan = ask(bench(question()), MIN_COUNT, replace(THREE, sensitivity=True))
    bounds = [shift.bound for shift in plan.shifts]
    assert bounds == sorted(bounds)
    posted = next(shift for shift in plan.shifts if shift.bound == TTFT.bound)
    assert posted.objective == pytest.approx(plan.best.objective.value)
    objectives = [shift.objective for shift in plan.shifts if not math.isnan(shift.objective)]
    assert objectives[0] <= objectives[-1]
    assert all(a <= b for a, b in itertools.pairwise(objectives))


FACTORS = (0.5, 0.7, 1.0, 1.5, 2.0)


@given(st.lists(st.just(math.nan) | st.floats(0, 100), min_size=5, max_size=5))
def test_a_looser_bound_never_looks_worse_than_a_tighter_one(found):
    found[2] = 50.0  # of the requested bound, which is known exactly
    shifts = {f: Shift("ttft.p90", 2 * f, f"{f:g}", value) for f, value in zip(FACTORS, found, strict=True)}
    of = dict(shifts)
    made = monotone(shifts, question())
    assert [one.bound for one in made] == [2 * f for f in FACTORS]
    assert made[2] == of[1.0]
    values = [-math.inf if math.isnan(one.objective) else one.objective for one in made]
    assert values == sorted(values)
    for factor, one in zip(FACTORS, made, strict=True):
        source = of[float(one.choice)]  # a configuration keeps its own result
        assert one.objective == source.objective or (math.isnan(one.objective) and math.isnan(source.objective))
        if one.choice != f"{factor:g}":
            assert (float(one.choice) < factor) == (factor > 1)  # from the side of the requested bound


@pytest.mark.slow
def test_a_strategy_that_tries_everything_finds_the_best():
    pytest.importorskip("optuna")
    from lengthwise.search.strategy import Bayesian

    posted, plans = bench(question()), []
    for jobs in (1, 2):
        strategy = Bayesian(MIN_COUNT.alternatives(), trials=9, seed=0, batch_size=3)
        with workers.threads(jobs) as worker_pool:
            plans.append(ask(posted, MIN_COUNT, replace(THREE, strategy=strategy), worker_pool))
    assert reported(plans[0]) == reported(plans[1])
    assert plans[0].effort.candidates == len(MIN_COUNT)
    assert plans[0].best.key == ask(posted, MIN_COUNT).best.key


def test_underspecified_questions_are_refused():
    from lengthwise.schema.errors import InputError

    for name in ("cost_at_rate", "fewest_gpus", "goodput"):
        with pytest.raises(InputError, match="needs a rate"):
            Question(OBJECTIVES[name], question().slo_limits)
    with pytest.raises(InputError, match="single request"):
        question("goodput", rate_rps=1.0)
    with pytest.raises(InputError, match="precision"):
        question(precision=0.0)


def test_a_deployment_is_built_from_its_settings():
    built = Build()({"deployment.tp": 2, "engine.max_num_seqs": 7})
    assert (built.parallel.tp, built.limits.max_num_seqs) == (2, 7)
