"""What must hold of every laboratory."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise import engine
from lengthwise.lab import Contestant, gap_closed, lab, ratio
from lengthwise.lab.experiment import at_rate, run_values
from lengthwise.metrics import summarize
from lengthwise.schema.deployment import Scheduler
from lengthwise.schema.errors import InputError
from lengthwise.schema.lab import LoadUnit
from lengthwise.schema.workload import SharedPrefixes


def of(table, policy, predictor, load):
    return next(c for c in table.cells if (c.policy, c.predictor, c.load) == (policy, predictor, load))


def test_fcfs_closes_nothing_and_the_oracle_all_of_its_own_gap(table) -> None:
    for load in table.loads:
        assert of(table, "fcfs", "", load)["gap_closed"].value == 0
        own = of(table, "oracle", "oracle", load)["gap_closed"]
        assert own.value == pytest.approx(1, abs=1e-12)
        assert own.half_width == pytest.approx(0, abs=1e-12)
        assert of(table, "sjf", "oracle", load)["gap_closed"].value == pytest.approx(1, abs=1e-12)


def test_better_predictions_close_more(table) -> None:
    gaps = [of(table, "sjf", name, 4.0)["gap_closed"].value for name in ("oracle", "noisy", "reversed")]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[2] < 0 < gaps[1]


def test_every_side_serves_the_same_requests_at_the_same_rate(table) -> None:
    for load in table.loads:
        cells = table.at(2, load)
        assert [cell.name for cell in cells] == [
            "fcfs",
            "oracle (oracle)",
            "sjf (oracle)",
            "sjf (noisy)",
            "sjf (reversed)",
        ]
        assert len({cell.rate_rps for cell in cells}) == 1
        assert all(cell["served"].value == 1 for cell in cells)
        assert all(cell["slowdown.mean"].value >= 1 - 1e-9 for cell in cells)
        assert all(cell["preemptions_per_request"].value == 0 for cell in cells)
        assert all(cell["recomputed_tokens_per_request"].value == 0 for cell in cells)


def test_the_same_question_gives_the_same_bytes_however_many_work_at_a_time(table, small) -> None:
    def two_at_a_time(tasks, work):
        with ThreadPoolExecutor(2) as pool:
            yield from enumerate(pool.map(work, tasks))

    again = lab(small.question(), small.Bench(), each=two_at_a_time, engine_name="reference")
    assert repr(dataclasses.asdict(again)) == repr(dataclasses.asdict(table))


def test_progress_counts_every_run_once(small) -> None:
    reported = []
    lab(
        small.question(loads=(1.0,), seeds=2),
        small.Bench(20),
        progress=lambda *at: reported.append(at),
        engine_name="reference",
    )
    assert [done for done, _ in reported] == list(range(len(reported)))
    assert {of for _, of in reported} == {reported[-1][0]}


def test_loads_are_shares_of_what_saturates(small) -> None:
    bench = small.Bench(150)
    low, high = (
        of(small.succeeded(bench, loads=(load,), seeds=1, predictors=("oracle",)), "fcfs", "", load)
        for load in (0.5, 2.0)
    )
    assert high.rate_rps == pytest.approx(4 * low.rate_rps)
    assert low["requests_per_s"].value == pytest.approx(low.rate_rps, rel=0.1)
    assert high["requests_per_s"].value == pytest.approx(high.rate_rps / 2, rel=0.1)


def test_loads_in_requests_a_second_and_by_time_alone(small) -> None:
    by_rate = small.succeeded(loads=(3.0,), seeds=1, unit=LoadUnit.RPS)
    assert {cell.rate_rps for cell in by_rate.cells} == {3.0}
    alone = small.succeeded(loads=(1.0,), seeds=1, unit=LoadUnit.ALONE)
    fcfs = of(alone, "fcfs", "", 1.0)
    jct, slowdown = fcfs["jct.mean"].value, fcfs["slowdown.mean"].value
    assert fcfs.rate_rps > 2 / jct  # no request is alone
    assert slowdown > 1


def test_a_policy_without_predictions_runs_once(small) -> None:
    shortest = Contestant("shortest prompt", Scheduler(rank="shortest_prompt", memory="paged_by_chunk"), predicts=False)
    made = small.succeeded(policies=(shortest,), loads=(1.0,), seeds=1)
    assert [cell.name for cell in made.cells] == ["fcfs", "oracle (oracle)", "shortest prompt"]


def test_a_single_seed_knows_no_interval(small) -> None:
    made = small.succeeded(loads=(4.0,), seeds=1)
    assert not any(e.has_interval for cell in made.cells for e in cell.values.values())
    assert made.decisions[0].reason == "one seed"


def test_waiting_counts_every_stay_in_the_queue(small) -> None:
    """Who is let in at once and made to leave again has waited, too."""
    moving = Scheduler(
        rank="mlfq(quantum=2)", memory="paged_by_chunk", preemption="by_rank", preemption_interval_steps=1
    )
    bench = small.Bench()
    workload = at_rate(bench.requests(0, ""), 400.0)
    records = engine.simulate(workload, bench.deployment(moving, 2), engine="reference")
    r = records.requests
    assert r.preemptions.sum() > len(workload)
    found = run_values(records, 2, np.ones(len(workload)))
    first_s = r.scheduled_s - r.arrival_s
    assert found["wait.max"] == r.queued_for_s.max() > first_s.max()
    assert found["wait.mean"] == pytest.approx(r.queued_for_s.mean())
    assert found["waiting_share"] == pytest.approx(r.queued_for_s.sum() / (r.finished_s - r.arrival_s).sum())


def test_cached_tokens_are_found_and_not_recomputed(small) -> None:
    bench, n = small.Bench(60), 60
    prefixes = SharedPrefixes(16, np.arange(n + 1), np.arange(n) % 2)
    workload = replace(at_rate(bench.requests(0, ""), 50.0), prefixes=prefixes)
    plain = bench.deployment(Scheduler(), 4)
    cached = replace(plain, limits=replace(plain.limits, enable_prefix_caching=True))
    records = engine.simulate(workload, cached, engine="reference")
    found = run_values(records, 4, np.ones(n), cached)
    assert found["hit_rate"] == pytest.approx(16 * (n - 2) / workload.prompt_tokens.sum(), rel=0.1)
    assert found["hit_rate"] == pytest.approx(summarize(records, cached, workload=workload).prefix_cache.hit_rate.value)
    assert "loaded_share" not in found
    assert records.requests.preemptions.sum() == found["recomputed_tokens_per_request"] == 0
    uncached = run_values(engine.simulate(workload, plain, engine="reference"), 4, np.ones(n), plain)
    assert "hit_rate" not in uncached


@given(st.lists(st.tuples(*[st.floats(0.1, 100)] * 2), min_size=2, max_size=8), st.floats(0, 1))
def test_a_mixture_of_both_ends_closes_its_share(ends, share) -> None:
    oracle, more = np.array(ends).T
    fcfs = oracle + more
    own = fcfs - share * more
    found = gap_closed(own, fcfs, oracle, 0.95)
    if found.value == found.value:  # else the seeds do not tell that there is a gap
        assert found.value == pytest.approx(share, abs=1e-6)
        assert found.half_width == pytest.approx(0, abs=1e-5)


def test_pairing_narrows_the_interval() -> None:
    rng = np.random.default_rng(0)
    seeds = rng.lognormal(0, 1, 10)
    found = ratio(0.8 * seeds + rng.normal(0, 0.001, 10), seeds, 0.95)
    assert found.value == pytest.approx(0.8, abs=0.01)
    assert found.half_width < 0.01


@pytest.mark.parametrize(
    ("changes", "states"),
    [
        ({"policies": ()}, "at least one of its policies"),
        ({"loads": ()}, "at least one of its loads"),
        ({"loads": (0.0,)}, "loads must be above 0"),
        ({"batch_sizes": (0,)}, "batch sizes must be at least 1"),
        ({"seeds": 0}, "at least 1 seed"),
        ({"predictors": ()}, "needs a predictor"),
        ({"predictors": ("oracle", "oracle")}, "different names; repeated: oracle"),
        ({"policies": (Contestant("oracle", Scheduler(rank="sjf")),)}, "another name"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(changes, states, small) -> None:
    with pytest.raises(InputError, match=states):
        small.question(**changes)


def test_requests_that_come_at_once_have_no_load(small) -> None:
    with pytest.raises(InputError, match="one after the other"):
        lab(small.question(), small.Together(), engine_name="reference")


def test_a_predictor_may_only_predict(small) -> None:
    with pytest.raises(InputError, match="'noisy' changed the requests of seed 0"):
        lab(small.question(), small.Cheating(), engine_name="reference")


def test_a_bound_on_waiting_is_a_multiple_of_what_fcfs_waits(small) -> None:
    base = Scheduler(rank="sjf", memory="paged_by_chunk")
    bound = [Contestant(f"within {x:g}", base, max_wait_factor=x) for x in (1e-6, 0.7, 1e6)]
    made = small.succeeded(policies=(Contestant("sjf", base), *bound), predictors=("oracle",), loads=(4.0,))
    fcfs, free = of(made, "fcfs", "", 4.0), of(made, "sjf", "oracle", 4.0)
    tight, middle, loose = (of(made, policy.name, "oracle", 4.0) for policy in bound)
    assert tight["jct.mean"].value == pytest.approx(fcfs["jct.mean"].value, rel=0.02)
    assert loose.values == free.values
    assert free["jct.mean"].value <= middle["jct.mean"].value <= fcfs["jct.mean"].value
    assert middle.values != free.values
