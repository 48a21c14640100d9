"""SGLang's rules, worked by hand for small pools, in the records of both engines; and wrong settings."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

from lengthwise.engine import simulate
from lengthwise.schema.deployment import Deployment, EngineLimits, KvPlan, Parallelism, Scheduler, SglangSettings
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import Rejection
from lengthwise.schema.workload import UNCAPPED, Workload

sys.path.insert(0, str(Path(__file__).parents[1] / "laws"))
from worlds import GPU, MODEL, NODE, cost_tables

ENGINES = pytest.mark.parametrize("engine", ["reference", "kernel"])


def deployment(tokens, limits=None, rank="fcfs", stages=1, **settings):
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 1, **(limits or {})}
    return Deployment(
        MODEL, GPU, NODE, Parallelism(1, stages, 1), EngineLimits(**limits),
        Scheduler(rank, sglang=SglangSettings(**settings)), cost_tables([1] * stages),
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


WRONG = [
    ({"limits": {"enable_prefix_caching": True}}, "not modelled with a prefix cache yet"),
    ({"limits": {"max_step_seqs": 4}}, "not modelled with max_step_seqs yet"),
    ({"limits": {"watermark": 0.01}}, "not modelled with a watermark yet"),
    ({"limits": {"max_in_flight": 2}}, "not modelled with max_in_flight above 1 yet"),
    ({"stages": 2}, "not modelled with pipeline parallelism yet"),
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
