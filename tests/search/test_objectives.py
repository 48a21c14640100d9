"""Each objective against simulations of its own answer."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace

import numpy as np
import pytest
from market import Build, Chat, ask, bench, question

from lengthwise import engine
from lengthwise.metrics import Slo
from lengthwise.schema.deployment import Scheduler, TrtllmSettings
from lengthwise.schema.errors import UnknownNameError
from lengthwise.schema.plan import Limit, Status
from lengthwise.schema.records import Status as Outcome
from lengthwise.search.bounds import Ceiling, ceiling
from lengthwise.search.capacity_search import Effort, Trials, capacity, run_length
from lengthwise.search.limits import SloLimits, check_limit, excess, objective
from lengthwise.search.load import Load
from lengthwise.search.measurement import simulated_window
from lengthwise.search.objectives import EXACT_LENGTHS
from lengthwise.search.space import Space

pytestmark = pytest.mark.skipif(
    os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="millions of requests take hours without the compiler"
)

ONE = Space({"deployment.gpu": ("H100",)})
GPUS = Space({"deployment.gpu": ("A100-80GB", "H100"), "deployment.tp": (1, 2)})
RATE = 45.0


def strain(requested, replicas, settings=None, seeds=8):
    """How far the limits are strained by runs of the asked rate on so many replicas."""
    one = Build()(settings or {})
    sized = replace(one, parallel=replace(one.parallel, replicas=replicas))
    load = Load(Chat())
    top = replace(ceiling(sized, load.sample(), requested.slo_limits.limits), rate_rps=requested.rate_rps)
    requests = run_length(top, load, requested.slo_limits) * EXACT_LENGTHS
    return Trials(sized, load, requested.slo_limits, requests, range(seeds), Effort()).usage(requested.rate_rps)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cost_at_rate", "fewest_gpus"])
@pytest.mark.parametrize("rate", [3.0, 45.0])
def test_the_replicas_hold_the_rate_and_one_fewer_does_not(name, rate):
    sent = question(name, rate_rps=rate, seeds=8)
    for choice in ask(bench(sent), GPUS).choices:
        tp = choice.settings["deployment.tp"]
        if choice.status is not Status.RANKED:
            continue
        replicas = choice.gpus // tp
        assert strain(sent, replicas, choice.settings) <= 1
        assert replicas == 1 or strain(sent, replicas - 1, choice.settings) > 1
        price = Build()(choice.settings).gpu.price_per_hour_usd * choice.gpus
        assert choice.price_per_hour_usd == pytest.approx(price)
        assert choice.objective.value == pytest.approx(choice.gpus if name == "fewest_gpus" else price)
        assert choice.at.rate_rps == rate
        assert choice.at.satisfied
        assert choice.bounds.objective <= choice.objective.value


@pytest.mark.slow
def test_a_rate_just_beyond_what_two_replicas_hold_takes_three():
    one = Build()({"deployment.gpu": "H100"})
    two = replace(one, parallel=replace(one.parallel, replicas=2))
    capacity_rps = capacity(two, Load(Chat()), question().slo_limits, seeds=8).rate_rps
    for rate, gpus in ((capacity_rps.low * 0.98, 2), (capacity_rps.high * 1.02, 3)):
        assert ask(bench(question("fewest_gpus", rate_rps=rate, seeds=8)), ONE).best.gpus == gpus


@pytest.mark.slow
def test_given_replicas_are_taken_as_they_are():
    """Those that cannot hold the rate are rejected; the fewest of the others is the best."""
    auto = ask(bench(question("fewest_gpus", rate_rps=RATE)), ONE).best.gpus
    space = Space({"deployment.replicas": tuple(range(1, auto + 3))})
    plan = ask(bench(question("fewest_gpus", rate_rps=RATE)), space)
    assert plan.best.gpus == auto
    for choice in plan.choices:
        assert choice.gpus == choice.settings["deployment.replicas"]
        assert (choice.status is Status.REJECTED) == (choice.gpus < auto)
        assert choice.status is not Status.REJECTED or (choice.exclusion.reason and choice.exclusion.group)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cost_at_rate", "fewest_gpus"])
def test_a_rate_that_takes_too_many_gpus_is_rejected(name):
    need = ask(bench(question(name, rate_rps=RATE)), ONE).best.gpus
    assert ask(bench(question(name, rate_rps=RATE, max_gpus=need)), ONE).best.gpus == need
    plan = ask(bench(question(name, rate_rps=RATE, max_gpus=need - 1)), ONE)
    assert plan.best is None
    assert plan.choices[0].exclusion.group == f"takes more than {need - 1} GPUs"
    assert str(need - 1) in plan.choices[0].exclusion.reason


def test_more_rate_never_takes_fewer_gpus():
    needed = [ask(bench(question("fewest_gpus", rate_rps=rate)), ONE).best.gpus for rate in (5.0, 25.0, 60.0)]
    assert needed == sorted(needed)
    assert needed[0] < needed[-1]


def test_goodput_at_a_rate_is_the_share_of_good_requests():
    slo = Slo(ttft_s=0.2, tpot_s=0.02)
    sent = question("goodput", Limit("queueing_delay.p99", 5.0), rate_rps=10.0, slo=slo)
    plan = ask(bench(sent), GPUS)
    load = Load(Chat())
    for choice in plan.choices:
        if choice.status is not Status.RANKED:
            continue
        records = engine.simulate(load.at(9, 4000, 10.0), Build()(choice.settings), max_log_steps=0)
        good = slo.met(records.requests)["all"][800:].mean()
        assert choice.objective.value == pytest.approx(10.0 * good, rel=0.06)
        assert choice.objective.value <= 10.0
    best = plan.best.objective.value
    assert best == max(c.objective.value for c in plan.choices if c.status is Status.RANKED)


def test_goodput_of_what_cannot_hold_the_rate_is_rejected():
    sent = question("goodput", Limit("queueing_delay.p90", 1.0), rate_rps=500.0, slo=Slo(ttft_s=0.2))
    [choice] = ask(bench(sent), ONE).choices
    assert choice.status is Status.REJECTED
    assert re.fullmatch(
        r"[\d.]+ % of the requests exceed a Queueing of 1 s \(10 % may\) at 500 requests/s on 1 GPU",
        choice.exclusion.reason,
    )
    assert choice.exclusion.group == "breaks Queueing p90 ≤ 1 s at the rate"


def test_a_rate_is_rejected_for_the_limit_that_it_breaks_even_if_the_quantile_of_few_requests_holds():
    load, deployment, found = Load(Chat()), Build()({"deployment.gpu": "H100"}), []
    for rate in np.arange(25.0, 35.0):
        requests = run_length(Ceiling(rate, 0.0, 0.0, {}), load, SloLimits((Limit("ttft.p90", 1.0),)))
        window = simulated_window(load.at(0, requests, rate), deployment, 0)
        waits_s = np.sort(window.waits_s("ttft_s", 1.0))
        above = math.floor(len(waits_s) / 10) + 1  # the fewest that are more than a tenth
        limit = Limit("ttft.p90", float(waits_s[-above - 1 : len(waits_s) - above + 1].mean()))
        sent = question("goodput", limit, rate_rps=rate, slo=Slo(ttft_s=1.0), seeds=1)
        [choice] = ask(bench(sent), ONE).choices
        if choice.status is Status.REJECTED and limit.is_satisfied(choice.at.value("ttft.p90")):
            found.append(choice)
    assert found
    for choice in found:
        assert choice.at.usage["ttft.p90"] > 1
        share = 10 * choice.at.usage["ttft.p90"]
        over = re.match(r"([\d.]+) % of the requests exceed a TTFT of [\d.]+ ms \(10 % may\)", choice.exclusion.reason)
        assert over, choice.exclusion.reason
        assert float(over[1]) > 10
        assert float(over[1]) == pytest.approx(share, rel=5e-3)


@pytest.mark.parametrize("name", ["requests_per_dollar", "fewest_gpus", "goodput", "makespan"])
def test_rejected_requests_are_the_reason_with_their_number_and_the_remedy(name):
    own_rules = TrtllmSettings(capacity_scheduler_policy="MAX_UTILIZATION")

    class Undivided(Build):
        def __call__(self, settings):
            own = replace(super().__call__(settings), scheduler=Scheduler(trtllm=own_rules))
            return replace(own, limits=replace(own.limits, max_num_batched_tokens=1024))

    load = Load(Chat())
    sample = load.batch(0, 300) if name == "makespan" else load.sample()
    above = int((sample.prompt_tokens > 1024).sum())
    sent = question(name, rate_rps=2.0, slo=Slo(ttft_s=1.0), requests=300)
    [choice] = ask(bench(sent, build=Undivided()), ONE).choices
    assert choice.status is Status.REJECTED
    assert choice.exclusion.reason.startswith(
        f"{above:,} of {len(sample):,} requests are rejected because the prompt is above the token budget of a step: "
        "raise engine.max_num_batched_tokens (1,024) or set scheduler.trtllm.enable_chunked_prefill = true"
    )
    records = engine.simulate(replace(sample, arrival_s=np.arange(len(sample)) * 1.0), Undivided()({}), max_log_steps=0)
    assert (records.requests.status == Outcome.REJECTED).sum() == above


def test_a_few_rejected_requests_come_after_the_limit_that_the_load_breaks():
    class Short(Build):
        def __call__(self, settings):
            return replace(super().__call__(settings), max_model_len=1950)

    sent = question("goodput", rate_rps=500.0, slo=Slo(ttft_s=1.0))
    [choice] = ask(bench(sent, Chat(prompt=400.0), Short()), ONE).choices
    first, second = choice.exclusion.reason.split("; ")
    assert "exceed a TTFT" in first
    assert re.fullmatch(
        r"[\d,]+ of 4,096 requests are rejected because the prompt reaches max_model_len: raise engine.max_model_len "
        r"\(1,950\)",
        second,
    )


@pytest.mark.parametrize(
    ("limit", "usage", "text"),
    [
        (Limit("ttft.p90", 0.5), 1.003, "10.03 % of the requests exceed a TTFT of 500 ms (10 % may)"),
        (Limit("ttft.p90", 1.234), 3.7, "37 % of the requests exceed a TTFT of 1.234 s (10 % may)"),
        (Limit("jct.p99", 1200), 2, "2 % of the requests exceed a JCT of 1200 s (1 % may)"),
        (Limit("tbt.p99", 0.05), 1.5, "1.5 % of the times between tokens are above 50 ms (1 % may)"),
        (Limit("ttft.mean", 0.5), 1.0004, "TTFT mean is 500.2 ms (limit 500 ms)"),
        (Limit("jct.mean", 1200), 1.5, "JCT mean is 1800 s (limit 1200 s)"),
        (Limit("jct.mean", 1200), float("inf"), "JCT mean is infinite (limit 1200 s)"),
        (Limit("kv_utilization", 0.9), 1.05, "KV cache in use is 94.5 % (limit 90 %)"),
        (Limit("within_slo", 0.95, at_least=True), 2, "10 % of the requests break the SLO (5 % may)"),
    ],
)
def test_a_broken_limit_is_written_with_units_and_with_enough_digits(limit, usage, text):
    assert excess(limit, usage) == text


def test_a_makespan_is_the_end_of_the_batch():
    sent = replace(question("makespan", requests=700, seeds=3), slo_limits=SloLimits(()))
    plan = ask(bench(sent), GPUS)
    load = Load(Chat())
    for choice in plan.choices:
        if choice.status is not Status.RANKED:
            continue
        ends = [engine.simulate(load.batch(seed, 700), Build()(choice.settings), seed=seed).end_s for seed in range(3)]
        assert choice.objective.value == pytest.approx(sum(ends) / 3)
        assert choice.bounds.objective <= min(ends)
    assert plan.best.objective.value == min(c.objective.value for c in plan.choices if c.at)


def test_a_broken_limit_of_a_batch_has_its_unit_its_interval_and_its_bound():
    limits = SloLimits((Limit("ttft.p90", 1e-3),))
    sent = replace(question("makespan", requests=100, seeds=3), slo_limits=limits)
    [choice] = ask(bench(sent), ONE).choices
    assert choice.status is Status.REJECTED
    assert re.fullmatch(
        r"TTFT p90 is [\d.]+ m?s( ± [\d.]+ m?s| in one run) \(limit 1 ms\) when all requests arrive at once",
        choice.exclusion.reason,
    )
    assert choice.exclusion.group == "breaks TTFT p90 ≤ 1 ms"


def test_no_batch_is_done_before_its_bound_though_few_requests_differ_much_by_seed():
    for offset in range(5):
        draw = Chat(output=200.0, offset=offset)
        plan = ask(bench(replace(question("makespan", requests=5), slo_limits=SloLimits(())), draw), ONE)
        assert plan.best.bounds.objective <= plan.best.objective.value


def test_a_trace_of_fewer_requests_is_run_completely():
    """Its bound is of the requests that there are."""
    sent = replace(question("makespan", requests=5000), slo_limits=SloLimits(()))
    few = ask(bench(sent, lambda seed, n: Chat()(seed, min(n, 50))), ONE).best
    assert few.bounds.objective <= few.objective.value
    assert few.requests == (4 + 1) * 50
    assert few.at.rate_rps == pytest.approx(50 / few.objective.value)


def test_a_batch_that_is_not_served_completely_is_rejected():
    class Short(Build):
        def __call__(self, settings):
            return replace(super().__call__(settings), max_model_len=1000)

    sent = replace(question("makespan", requests=200), slo_limits=SloLimits(()))
    [choice] = ask(bench(sent, build=Short()), ONE).choices
    assert choice.status is Status.REJECTED
    assert choice.exclusion.group == "does not serve all requests"


@pytest.mark.slow
def test_the_energy_of_an_output_token_is_power_over_tokens():
    for sent in (question("energy"), question("energy", rate_rps=5.0)):
        best = ask(bench(sent), GPUS).best
        values = best.at
        assert best.objective.value == pytest.approx(
            values.value("power_w") / values.value("output_tokens_per_s"), rel=0.02
        )
    assert best.at.rate_rps == 5.0


def test_requests_per_dollar_are_capacity_over_price():
    sent = question("requests_per_dollar")
    choice = ask(bench(sent), ONE).best
    again = capacity(Build()({}), Load(Chat()), sent.slo_limits, precision=sent.precision, seeds=sent.seeds)
    assert choice.capacity_rps == again.rate_rps
    assert choice.objective.value == pytest.approx(again.rate_rps.value * 3600 / choice.price_per_hour_usd)
    assert choice.at.rate_rps == again.rate_rps.low
    rates = [point.rate_rps for point in choice.points]
    assert rates == sorted(rates)
    assert choice.at in choice.points
    assert strain(replace(sent, rate_rps=choice.capacity_rps.low), 1) <= 1
    assert strain(replace(sent, rate_rps=choice.capacity_rps.high * 1.05), 1) > 1


def test_a_misspelt_limit_suggests_its_own_statistic():
    for name in ("tfft.p95", "ttft_p95"):
        with pytest.raises(UnknownNameError, match=r"Did you mean: ttft\.p95"):
            check_limit(Limit(name, 1.0))


def test_objectives_are_known_by_name():
    assert objective("makespan").unit == "s"
    with pytest.raises(UnknownNameError, match="cost_at_rate"):
        objective("cost_at_rat")
