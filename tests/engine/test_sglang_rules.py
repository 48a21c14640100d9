"""SGLang's rules, worked by hand for small pools, in the records of both engines; and wrong settings."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

from lengthwise.engine import simulate
from lengthwise.schema.deployment import (
    SCHEDULE_POLICIES,
    Deployment,
    EngineLimits,
    KvPlan,
    Parallelism,
    Scheduler,
    SglangSettings,
)
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import Rejection
from lengthwise.schema.workload import UNCAPPED, SharedPrefixes, Workload

sys.path.insert(0, str(Path(__file__).parents[1] / "laws"))
from worlds import GPU, MODEL, NODE, cost_tables

ENGINES = pytest.mark.parametrize("engine", ["reference", "kernel"])


def deployment(tokens, limits=None, rank="fcfs", stages=1, overlap=False, **settings):
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 1, **(limits or {})}
    return Deployment(
        MODEL, GPU, NODE, Parallelism(1, stages, 1), EngineLimits(**limits),
        Scheduler(rank, sglang=SglangSettings(**settings), async_scheduling=overlap), cost_tables([1] * stages),
        KvPlan(tokens, 1, 0.0, 0.0, 0.0, 0.0), max_model_len=tokens,
    )  # fmt: skip


def requests(prompt, output, max_tokens, **columns):
    n = len(prompt)
    return Workload(
        np.zeros(n), np.array(prompt), np.array(output), max_tokens=np.array(max_tokens), **columns
    )  # fmt: skip


@ENGINES
@pytest.mark.parametrize(("limit", "conservativeness", "is_second_step"), [(37, 1, 1), (38, 1, 0), (38, 0, 1)])
def test_a_request_is_admitted_if_its_limit_fits_beside_a_share_of_the_limits_of_others(
    engine, limit, conservativeness, is_second_step
):
    # After its prompt of 10 tokens, 0.7 of the other 59 tokens of the first request are kept free: of 100 tokens 48.7
    # are left. The second one needs 10 + limit + 1 page.
    made = deployment(100, schedule_conservativeness=conservativeness)
    r = simulate(requests([10, 10], [20, 5], [60, limit]), made, engine=engine).requests
    assert r.scheduled_s[1] == (r.first_token_s[0] if is_second_step else r.finished_s[0])


@ENGINES
def test_a_request_with_fewer_output_tokens_is_retracted_when_memory_is_short(engine):
    both = requests([10, 10], [18, 18], [18, 18])
    careless = simulate(both, deployment(40, schedule_conservativeness=0), engine=engine)
    assert careless.requests.preemptions.tolist() == [0, 1]
    cautious = simulate(both, deployment(40, schedule_conservativeness=2), engine=engine)
    assert cautious.requests.preemptions.tolist() == [0, 0]
    assert cautious.requests.scheduled_s[1] == cautious.requests.finished_s[0]


@ENGINES
@pytest.mark.parametrize("is_mixed", [False, True])
def test_decodes_wait_for_chunks_unless_chunks_are_mixed(engine, is_mixed):
    made = deployment(400, enable_mixed_chunk=is_mixed)
    steps = simulate(requests([10, 200], [50, 5], [50, 5]), made, engine=engine).steps
    assert steps.prefill_tokens.max() <= 64
    chunks = steps.decode_seqs[steps.prefill_seqs > 0]
    assert (chunks > 0).any() == is_mixed


@ENGINES
def test_whole_prompts_are_bounded_by_max_prefill_tokens(engine):
    made = deployment(900, chunked_prefill=False, max_prefill_tokens=250)
    steps = simulate(requests([200, 100, 40], [5, 5, 5], [5, 5, 5]), made, engine=engine).steps
    assert steps.prefill_tokens[:2].tolist() == [200, 140]


@ENGINES
def test_the_rank_orders_the_queue(engine):
    work = requests([10, 10, 10], [30, 30, 5], [80, 80, 80], predicted_tokens=np.array([30.0, 30.0, 5.0]))
    r = simulate(work, deployment(100, rank="sjf"), engine=engine).requests
    assert r.scheduled_s[2] < min(r.scheduled_s[:2])


@ENGINES
def test_without_a_limit_a_request_may_fill_the_pool_and_a_prompt_above_it_is_refused(engine):
    made = deployment(60)
    r = simulate(requests([10, 58, 59], [70, 1, 1], [UNCAPPED] * 3), made, engine=engine).requests
    assert r.output_tokens.tolist() == [48, 0, 0]
    assert r.rejection.tolist() == [Rejection.NONE, *[Rejection.REFUSED_BY_MEMORY_POLICY] * 2]


@ENGINES
def test_requests_that_ignore_eos_run_beside_each_other_if_their_ends_fit(engine):
    # The first prompt and limit take 61 tokens, the second prompt 11. Without eos the second limit would count, too.
    exact = {"ignore_eos": np.array([True, True])}
    work = requests([10, 10], [50, 10], [50, 10], **exact)
    r = simulate(work, deployment(72), engine=engine).requests
    assert r.scheduled_s[1] == r.scheduled_s[0]
    assert r.preemptions.sum() == 0
    r = simulate(work, deployment(71), engine=engine).requests
    assert r.scheduled_s[1] == r.first_token_s[0]


def test_both_engines_sort_expected_ends_as_sglang_which_puts_some_before_a_shorter_one():
    work = requests([11, 7, 16, 6, 9], [37, 26, 63, 39, 38], [37, 26, 63, 39, 38], ignore_eos=np.ones(5, bool))
    for tokens in range(100, 260, 3):
        made = deployment(tokens, chunked_prefill=False)
        one, other = (simulate(work, made, engine=engine).requests.scheduled_s for engine in ("reference", "kernel"))
        np.testing.assert_array_equal(one, other)


CACHED = {"enable_prefix_caching": True, "prefix_cache": "sglang"}


def sharing(documents, own, output, arrival_s=None):
    """Requests whose prompts have the 40 tokens of a document (-1: none) and ``own`` tokens."""
    documents, own = np.array(documents), np.array(own)
    shared = np.where(documents < 0, 0, 40)
    ids = np.concatenate([np.arange(40) + 100 * one for one in documents if one >= 0])
    prefixes = SharedPrefixes(1, np.concatenate([[0], np.cumsum(shared)]), ids)
    work = requests(shared + own, output, [20] * len(own), prefixes=prefixes)
    return dataclasses.replace(work, arrival_s=np.zeros(len(own)) if arrival_s is None else np.array(arrival_s))


def served(workload, made, engine, **options):
    """The numbers of the requests in the order of their first admissions."""
    return np.argsort(simulate(workload, made, engine=engine, **options).requests.scheduled_s).tolist()


@ENGINES
def test_the_largest_limit_goes_first_by_lof(engine):
    work = requests([10] * 4, [5] * 4, [20, 60, 40, 60])
    assert served(work, deployment(100, {"max_num_seqs": 1}, schedule_policy="lof"), engine) == [1, 3, 2, 0]


def test_a_random_order_repeats_with_its_seed_in_both_engines():
    work, made = requests([10] * 6, [5] * 6, [20] * 6), deployment(99, {"max_num_seqs": 1}, schedule_policy="random")
    orders = [served(work, made, "kernel", seed=seed) for seed in range(6)]
    assert orders == [served(work, made, "reference", seed=seed) for seed in range(6)]
    assert len(set(map(tuple, orders))) > 3


@ENGINES
@pytest.mark.parametrize(("order", "second"), [("fcfs", 1), ("lpm", 2)])
def test_the_longest_cached_prefix_goes_first_by_lpm(engine, order, second):
    work = sharing([0, -1, 0], [5, 30, 8], [9, 9, 9], [0, 1e-9, 1e-9])
    made = deployment(200, CACHED | {"max_num_seqs": 1}, schedule_policy=order)
    found = simulate(work, made, engine=engine).requests
    assert np.argsort(found.scheduled_s).tolist()[1] == second
    assert found.cached_tokens.tolist() == [0, 0, 40]


@ENGINES
@pytest.mark.parametrize(("order", "cached"), [("fcfs", 0), ("lpm", 40)])
def test_of_requests_that_begin_alike_lpm_tries_one_early(engine, order, cached):
    # A step has 64 tokens of prompts: all of the first request, and 19 of the second one or, by lpm, of the third one.
    found = simulate(
        sharing([0, 0, -1], [5, 5, 20], [9] * 3), deployment(400, CACHED, schedule_policy=order), engine=engine
    )
    assert found.requests.cached_tokens.tolist() == [0, cached, 0]
    assert found.steps.prefill_tokens[:2].tolist() == [64, 45 - cached - 19 + 20 if cached else 46]


@ENGINES
@pytest.mark.parametrize(("overlap", "cached"), [(False, 40), (True, 0)])
def test_with_overlap_a_prompt_is_found_a_step_later(engine, overlap, cached):
    # The second prompt enters the step after the first one's, which is formed before that one has ended.
    made = deployment(400, CACHED, overlap=overlap)
    found = simulate(sharing([0, 0, 0], [24, 24, 24], [9] * 3, [0, 0, 0.01]), made, engine=engine).requests
    assert found.cached_tokens.tolist() == [0, cached, 40]


@ENGINES
@pytest.mark.parametrize(("limit", "decodes"), [(3, 2), (60, 3)])
def test_with_overlap_an_output_that_ends_by_itself_decodes_once_more(engine, limit, decodes):
    found = simulate(requests([10], [3], [limit]), deployment(100, overlap=True), engine=engine)
    assert found.steps.decode_seqs.tolist() == [0] + [1] * decodes
    assert found.requests.finished_s[0] == found.steps.end_s[2]
    assert found.requests.output_tokens.tolist() == [3]


@ENGINES
def test_with_overlap_a_retracted_request_loses_its_token_in_flight(engine):
    both = requests([10, 10], [18, 18], [18, 18])
    steps = [
        simulate(both, deployment(40, schedule_conservativeness=0, overlap=overlap), engine=engine)
        for overlap in (False, True)
    ]
    assert [run.requests.preemptions.tolist() for run in steps] == [[0, 1], [0, 1]]
    assert [run.requests.output_tokens.tolist() for run in steps] == [[18, 18], [18, 18]]
    assert steps[1].steps.decode_seqs.sum() == steps[0].steps.decode_seqs.sum() + 1


@ENGINES
@pytest.mark.parametrize(("order", "expected"), [("fcfs", [0, 1, 2, 3, 4]), ("dfs-weight", [0, 1, 3, 2, 4])])
def test_the_part_of_the_tree_with_most_waiting_requests_goes_first_by_dfs_weight(engine, order, expected):
    # Two requests wait for the second document and one for the first; then one for each, and the first one is older.
    made = deployment(400, CACHED | {"max_num_seqs": 1}, schedule_policy=order)
    documents, own, output = [0, 1, 0, 1, 1], [5] * 5, [9] * 5
    second = simulate(sharing(documents[:2], own[:2], output[:2], [0, 1e-9]), made, engine=engine).requests.scheduled_s[
        1
    ]
    assert served(sharing(documents, own, output, [0, 1e-9, *[second + 1e-9] * 3]), made, engine) == expected


@pytest.mark.parametrize("order", SCHEDULE_POLICIES)
def test_both_engines_agree_with_a_long_queue(order):
    rng = np.random.default_rng(7)
    documents = rng.integers(-1, 9, 150)
    work = sharing(documents, rng.integers(1, 60, 150), rng.integers(1, 20, 150), np.repeat([0.0, 0.05], [140, 10]))
    made = deployment(700, CACHED, schedule_policy=order)
    one, other = (simulate(work, made, engine=engine).requests for engine in ("reference", "kernel"))
    for name in ("scheduled_s", "finished_s", "cached_tokens", "preemptions"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert one.cached_tokens.sum() > 1000


@ENGINES
def test_only_tokens_after_the_prefix_count_in_a_step(engine):
    made = deployment(400, CACHED | {"max_num_seqs": 1})
    steps = simulate(sharing([0, 0], [5, 30], [9, 9]), made, engine=engine).steps
    assert steps.prefill_tokens[steps.prefill_seqs > 0].tolist() == [45, 30]


WRONG = [
    ({"limits": {"enable_prefix_caching": True}}, "has SGLang's own prefix cache; prefix_cache is 'vllm'"),
    ({"schedule_policy": "lpm"}, 'schedule_policy "lpm" orders requests by their prefixes in the cache'),
    ({"schedule_policy": "sjf"}, "there is no schedule_policy named 'sjf'"),
    ({"schedule_policy": "lof", "rank": "sjf"}, "\"lof\" orders the queue by itself, and rank 'sjf' would change"),
    ({"limits": {"max_step_seqs": 4}}, "not modelled with max_step_seqs yet"),
    ({"limits": {"watermark": 0.01}}, "not modelled with a watermark yet"),
    ({"limits": {"max_in_flight": 2}}, "not modelled with max_in_flight above 1 yet"),
    ({"stages": 2}, "not modelled with pipeline parallelism yet"),
    ({"limits": {"timeout_s": 3.0}, "overlap": True}, "async_scheduling is not modelled with timeout_s yet"),
    ({"stages": 2, "limits": {"max_step_seqs": 4}}, "not modelled with pipeline parallelism or max_step_seqs yet"),
    ({"schedule_conservativeness": -0.1}, "schedule_conservativeness must be at least 0 and finite; it is -0.1"),
    ({"max_prefill_tokens": 0}, "max_prefill_tokens must be a whole number of at least 1; it is 0"),
    ({"chunked_prefill": False, "enable_mixed_chunk": True}, "enable_mixed_chunk needs chunked_prefill = true"),
]


@pytest.mark.parametrize(("given", "report"), WRONG)
def test_wrong_settings_are_named(given, report):
    with pytest.raises(InputError, match=report):
        simulate(requests([10], [5], [5]), deployment(100, **given))


def test_requests_need_limits():
    work = dataclasses.replace(requests([10], [5], [5]), max_tokens=None)
    with pytest.raises(
        InputError, match=r'"sglang" admits requests by their max_tokens.*\[workload\] max_tokens = 512'
    ):
        simulate(work, deployment(100))


@pytest.mark.parametrize("axis", [{"victim": "sjf"}, {"memory": "paged_by_chunk"}, {"binning": "one"}])
def test_other_policies_are_refused(axis):
    (name,) = axis
    with pytest.raises(InputError, match=f"has its own rules instead of a {name}; it is"):
        Scheduler(sglang=SglangSettings(), **axis)
