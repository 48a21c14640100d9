"""Law 51, requests that come after others: when they are sent, and what becomes of them."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from observers import LAW, run
from worlds import GPU, INFINITY, MODEL, NODE, cost_tables, deployments, workloads

from lengthwise.engine import simulate
from lengthwise.metrics import summarize
from lengthwise.schema.deployment import Deployment, EngineLimits, KvPlan, Parallelism, Scheduler
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import Rejection, Status
from lengthwise.schema.workload import After, Workload

ENGINES = ["kernel", "reference"]


def one_replica():
    return Deployment(
        MODEL, GPU, NODE, Parallelism(), EngineLimits(max_num_seqs=8, block_size=4), Scheduler(), cost_tables([4]),
        KvPlan(500, 4, 0.0, 0.0, 0.0, 0.0), max_model_len=300,
    )  # fmt: skip


def edges(after):
    """(child, parent) of each."""
    return np.repeat(np.arange(len(after)), np.diff(after.start)), after.parent


def chains(lengths):
    """Chains of so many requests, one after the other in the columns."""
    ends = np.cumsum(lengths)
    first = set((ends - lengths).tolist())
    parents = [[] if i in first else [i - 1] for i in range(ends[-1])]
    return After(np.cumsum([0, *map(len, parents)]), np.array([one for some in parents for one in some], np.int64))


@LAW
@given(workloads(), deployments(), st.sampled_from([INFINITY, INFINITY, 0.5]))
def test_a_request_is_sent_when_its_time_has_come_and_all_before_it_have_finished(workload, deployment, limit_s):
    assume(workload.after is not None)
    r = run(workload, deployment, time_limit_s=limit_s).requests
    child, parent = edges(workload.after)
    deadline_s = workload.arrival_s.copy()
    sent_s = np.nan_to_num(r.finished_s, nan=INFINITY)[parent] + workload.after.delay_s[child]
    np.maximum.at(deadline_s, child, sent_s)
    deadline_s[np.isinf(deadline_s)] = np.nan
    behind = r.rejection == Rejection.PARENT_NOT_FINISHED
    np.testing.assert_array_equal(r.arrival_s[~behind], deadline_s[~behind])
    never = np.isnan(deadline_s) & ~behind
    assert (r.status[never] == Status.UNFINISHED).all()
    assert (r.output_tokens[never | behind] == 0).all()
    assert (r.status[parent[r.scheduled_s[child] >= 0]] == Status.FINISHED).all()


@LAW
@given(workloads(), deployments())
def test_empty_dependencies_change_nothing(workload, deployment):
    assume(workload.concurrency is None)
    plain = workload.without_dependencies()
    nobody = After(np.zeros(len(workload) + 1, np.int64), np.zeros(0, np.int64))
    one, two = run(plain, deployment), run(dataclasses.replace(plain, after=nobody), deployment)
    np.testing.assert_array_equal(one.requests.finished_s, two.requests.finished_s)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_chain_takes_what_its_requests_take_one_after_another(engine):
    deployment = one_replica()
    prompt, output = np.array([5, 60, 17, 33]), np.array([3, 1, 20, 7])
    chain = Workload(np.zeros(4), prompt, output, after=chains([4]))
    chained = simulate(chain, deployment, engine=engine).requests
    alone = [
        simulate(Workload(np.zeros(1), prompt[i : i + 1], output[i : i + 1]), deployment).requests.finished_s[0]
        for i in range(4)
    ]
    np.testing.assert_allclose(chained.finished_s, np.cumsum(alone), rtol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_as_many_chains_as_slots_run_as_rounds_of_a_batch(engine):
    """Equal chains run side by side: each round is a batch of its own, as long as the first one."""
    deployment = one_replica()
    rounds, side = 5, 6
    after = After(
        np.concatenate([np.zeros(side, np.int64), np.arange((rounds - 1) * side + 1)]), np.arange((rounds - 1) * side)
    )
    n = rounds * side
    r = simulate(Workload(np.zeros(n), np.full(n, 30), np.full(n, 9), after=after), deployment, engine=engine).requests
    ends = r.finished_s.reshape(rounds, side)
    assert (ends == ends[:, :1]).all()
    np.testing.assert_allclose(ends[:, 0], ends[0, 0] * np.arange(1, rounds + 1), rtol=1e-9)


@pytest.mark.parametrize("engine", ENGINES)
def test_all_behind_a_request_that_cannot_run_are_refused_with_it(engine):
    deployment = one_replica()
    prompt = np.array([5, deployment.max_model_len + 1, 5, 5, 5])
    after = After(np.array([0, 0, 0, 1, 3, 4]), np.array([1, 0, 2, 0]))
    r = simulate(Workload(np.zeros(5), prompt, np.full(5, 3), after=after), deployment, engine=engine).requests
    assert r.rejection.tolist() == [0, Rejection.PROMPT_REACHES_MAX_MODEL_LEN, *[Rejection.PARENT_NOT_FINISHED] * 2, 0]
    assert r.status.tolist() == [Status.FINISHED, *[Status.REJECTED] * 3, Status.FINISHED]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_long_chain_behind_an_unservable_request_is_refused_completely(engine):
    n = 5000
    deployment = one_replica()
    prompt = np.full(n, 5)
    prompt[0] = deployment.max_model_len + 1
    chain = Workload(np.zeros(n), prompt, np.full(n, 3), after=chains([n]))
    r = simulate(chain, deployment, engine=engine).requests
    assert (r.status == Status.REJECTED).all()
    assert (r.rejection[1:] == Rejection.PARENT_NOT_FINISHED).all()


def test_all_requests_of_chains_count_however_they_stand_in_the_columns():
    """Chains one after another in the columns step back in time at each chain's first request."""
    deployment = one_replica()
    lengths = [4] * 50
    n = sum(lengths)
    dependent = Workload(np.zeros(n), np.full(n, 9), np.arange(n) % 7 + 1, after=chains(lengths))
    records = simulate(dependent, deployment)
    r = records.requests
    found = summarize(records)
    assert found.counts.arrivals == found.counts.finished == n
    assert found.jct_s.mean.value == pytest.approx((r.finished_s - r.arrival_s).mean())
    late_s = float(np.median(r.arrival_s))
    late = r.arrival_s >= late_s
    some = summarize(records, warmup_s=late_s)
    assert some.counts.arrivals == late.sum()
    assert some.jct_s.mean.value == pytest.approx((r.finished_s - r.arrival_s)[late].mean())
    cut = simulate(dependent, deployment, time_limit_s=late_s)
    assert summarize(cut).counts.arrivals == np.isfinite(cut.requests.arrival_s).sum() < n


@pytest.mark.parametrize(
    ("start", "parent", "report"),
    [
        ([0, 0, 1], [1], "request 1 has the parent 1"),
        ([0, 0, 1], [-1], "request 1 has the parent -1"),
        ([0, 1, 1], [0], "request 0 has the parent 0"),
        ([0, 1], [0, 0], "after.start must go from 0 to the 2 parents"),
        ([0, 0, 0, 0], [], "as many requests as the workload"),
    ],
)
def test_invalid_dependencies_are_reported(start, parent, report):
    with pytest.raises(InputError, match=report):
        Workload(np.zeros(2), np.ones(2), np.ones(2), after=After(np.array(start), np.array(parent, np.int64)))


def test_dependent_requests_are_refused_if_unsupported(tmp_path):
    from lengthwise.measure import LoadSettings
    from lengthwise.workload import write

    dependent = Workload(np.zeros(2), np.ones(2), np.ones(2), after=chains([2]))
    for does in (
        lambda: write(dependent, tmp_path / "w.csv"),
        lambda: LoadSettings(rate_rps=1.0).applied_to(dependent),
    ):
        with pytest.raises(InputError, match="does not support requests that depend on others"):
            does()
    assert not list(tmp_path.iterdir())


def test_a_closed_loop_cannot_have_dependent_requests():
    with pytest.raises(InputError, match="closed loop"):
        Workload(np.zeros(2), np.ones(2), np.ones(2), concurrency=1, after=After(np.zeros(3), np.zeros(0)))
