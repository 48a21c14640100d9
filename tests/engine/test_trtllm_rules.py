"""TensorRT-LLM's rules, worked by hand for small pools, in the records of both engines; and wrong settings."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

from lengthwise.engine import simulate
from lengthwise.schema.deployment import (
    Deployment,
    EngineLimits,
    KvPlan,
    Parallelism,
    Scheduler,
    SglangSettings,
    TrtllmSettings,
)
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.records import Rejection
from lengthwise.schema.workload import UNCAPPED, Workload

sys.path.insert(0, str(Path(__file__).parents[1] / "laws"))
from worlds import GPU, MODEL, NODE, cost_tables

ENGINES = pytest.mark.parametrize("engine", ["reference", "kernel"])
MAX_UTILIZATION = {"capacity_scheduler_policy": "MAX_UTILIZATION"}
IN_CHUNKS = {"enable_chunked_prefill": True}


def deployment(tokens, limits=None, rank="fcfs", size=1, stages=1, **settings):
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": size, **(limits or {})}
    return Deployment(
        MODEL, GPU, NODE, Parallelism(1, stages, 1), EngineLimits(**limits),
        Scheduler(rank, trtllm=TrtllmSettings(**settings)), cost_tables([1] * stages),
        KvPlan(tokens // size, size, 0.0, 0.0, 0.0, 0.0), max_model_len=tokens,
    )  # fmt: skip


def requests(prompt, output, max_tokens=None, **columns):
    n = len(prompt)
    limits = None if max_tokens is None else np.array(max_tokens)
    return Workload(np.zeros(n), np.array(prompt), np.array(output), max_tokens=limits, **columns)


@ENGINES
@pytest.mark.parametrize(("tokens", "is_at_once"), [(56, True), (55, False)])
def test_a_request_starts_if_its_limit_fits_beside_the_limits_of_others(engine, tokens, is_at_once):
    r = simulate(requests([10, 10], [2, 2], [18, 18]), deployment(tokens), engine=engine).requests
    assert r.scheduled_s[1] == (r.scheduled_s[0] if is_at_once else r.finished_s[0])
    assert r.preemptions.sum() == 0


@ENGINES
def test_a_limit_beyond_the_context_is_cut_to_it(engine):
    """TensorRT-LLM refuses no request for its limit; the first has the memory for 90 more tokens reserved, not 500."""
    r = simulate(requests([10, 10], [20, 2], [500, 18]), deployment(100), engine=engine).requests
    assert r.scheduled_s[1] == r.finished_s[0] > r.scheduled_s[0]
    assert r.output_tokens.tolist() == [20, 2]


@ENGINES
def test_no_request_passes_one_that_does_not_fit(engine):
    r = simulate(requests([10, 10, 10], [9, 2, 2], [10, 80, 5]), deployment(100), engine=engine).requests
    assert r.scheduled_s[1] == r.finished_s[0] > r.scheduled_s[0]
    assert r.scheduled_s[2] >= r.scheduled_s[1]


@ENGINES
def test_with_max_utilization_the_last_one_is_paused_and_returns_before_a_later_one(engine):
    # After their prompts and 10 decodes, each has 20 of 40 tokens. The second one is paused, and needs 21 to return.
    # Meanwhile the third one would fit.
    made = deployment(40, **MAX_UTILIZATION)
    alone = simulate(requests([10, 10], [18, 18]), made, engine=engine)
    assert alone.requests.preemptions.tolist() == [0, 1]
    work = dataclasses.replace(
        requests([10, 10, 8], [18, 18, 3]), arrival_s=np.array([0.0, 0.0, alone.steps.start_s[12]])
    )
    both = simulate(work, made, engine=engine)
    assert both.requests.preemptions.tolist() == [0, 1, 0]
    assert both.requests.scheduled_s[2] == both.requests.finished_s[0]
    assert both.steps.prefill_tokens[both.steps.prefill_tokens > 0].tolist() == [20, 21 + 8]


@ENGINES
def test_complete_prompts_stop_at_the_first_one_above_the_budget(engine):
    steps = simulate(requests([40, 30, 20], [5] * 3, [5] * 3), deployment(400), engine=engine).steps
    assert steps.prefill_tokens[:2].tolist() == [40, 50]
    assert steps.decode_seqs[1] == 1


@ENGINES
@pytest.mark.parametrize(
    ("policy", "tokens", "seqs"),
    [("FIRST_COME_FIRST_SERVED", [64, 52, 34], [1, 2, 1]), ("EQUAL_PROGRESS", [64, 50, 36], [2, 2, 1])],
)
def test_chunks_of_complete_blocks(engine, policy, tokens, seqs):
    # First come, first served: 64 of 100; the last 36, and 16 of 50; the last 34. In turn: 32 and 32; another 32 and
    # the last 18, which leaves 14 tokens, less than a block; the last 36.
    made = deployment(800, size=16, **IN_CHUNKS, context_chunking_policy=policy)
    steps = simulate(requests([100, 50], [9, 9], [9, 9]), made, engine=engine).steps
    assert steps.prefill_tokens[:3].tolist() == tokens
    assert steps.prefill_seqs[:3].tolist() == seqs


@ENGINES
def test_a_prompt_in_chunks_gets_all_its_blocks_at_once(engine):
    steps = simulate(requests([200], [5], [5]), deployment(400, **IN_CHUNKS), engine=engine).steps
    assert steps.kv_blocks[:4].tolist() == [200] * 4


@ENGINES
def test_a_paused_request_that_is_longer_than_a_step_runs_as_its_only_prompt(engine):
    limits = {"max_num_batched_tokens": 16}
    made = simulate(requests([10, 10], [25, 25]), deployment(40, limits, **MAX_UTILIZATION), engine=engine)
    assert made.requests.preemptions.tolist() == [0, 1]
    assert made.steps.prefill_tokens.max() > 16
    assert made.requests.output_tokens.tolist() == [25, 25]


@ENGINES
def test_paused_requests_do_not_pause_each_other(engine):
    made = deployment(40, {"max_num_batched_tokens": 8}, rank="fcfs_preempted_first", **MAX_UTILIZATION, **IN_CHUNKS)
    r = simulate(requests([10, 10], [28, 28]), made, engine=engine, time_limit_s=10.0).requests
    assert np.isfinite(r.finished_s).all()
    assert r.preemptions.tolist() == [0, 1]


@ENGINES
def test_the_rank_orders_waiting_requests_and_with_max_utilization_also_those_that_run(engine):
    work = requests([10, 10, 10], [20, 20, 5], [20, 20, 20], predicted_tokens=np.array([20.0, 20.0, 5.0]))
    r = simulate(work, deployment(60, rank="sjf"), engine=engine).requests
    assert r.scheduled_s[2] < r.scheduled_s[1]
    late = dataclasses.replace(work, arrival_s=np.array([0.0, 0.0, 1e-4]), max_tokens=None)
    r = simulate(late, deployment(26, {"max_num_seqs": 3}, rank="sjf", **MAX_UTILIZATION), engine=engine).requests
    assert r.preemptions[2] == 0 < r.preemptions.sum()
    assert r.finished_s[2] == min(r.finished_s)


@ENGINES
def test_outputs_end_at_the_pool_and_prompts_that_cannot_run_are_refused(engine):
    made = deployment(80, **MAX_UTILIZATION)
    r = simulate(requests([10, 65, 80], [90, 1, 1]), made, engine=engine).requests
    assert r.output_tokens.tolist() == [70, 0, 0]
    too_long = [Rejection.PROMPT_ABOVE_TOKEN_BUDGET, Rejection.PROMPT_REACHES_MAX_MODEL_LEN]
    assert r.rejection.tolist() == [Rejection.NONE, *too_long]
    r = simulate(requests([65], [1], [UNCAPPED]), deployment(80, **IN_CHUNKS), engine=engine).requests
    assert r.output_tokens.tolist() == [1]


WRONG = [
    ({"limits": {"enable_prefix_caching": True}}, "not modelled with a prefix cache yet"),
    ({"limits": {"max_in_flight": 2}}, "not modelled with max_in_flight above 1 yet"),
    ({"limits": {"max_step_seqs": 4}}, "not modelled with max_step_seqs yet"),
    ({"stages": 2}, "not modelled with pipeline parallelism yet"),
    ({"limits": {"max_num_seqs": 65}}, "of at least max_num_seqs .* 65; it is 64"),
    ({"size": 80, **IN_CHUNKS}, "at least a block: 80; it is 64"),
    ({"context_chunking_policy": "EQUAL_PROGRESS"}, "'EQUAL_PROGRESS' needs enable_chunked_prefill = true"),
]


@pytest.mark.parametrize(("given", "report"), WRONG)
def test_wrong_settings_are_named(given, report):
    with pytest.raises(InputError, match=report):
        simulate(requests([10], [5], [5]), deployment(160, **given))


@pytest.mark.parametrize("field", ["capacity_scheduler_policy", "context_chunking_policy"])
def test_unknown_policies_are_named(field):
    with pytest.raises(UnknownNameError, match=f"no {field} named 'max_utilisation'"):
        TrtllmSettings(**{field: "max_utilisation"})


def test_only_guaranteed_no_evict_needs_limits():
    work = requests([10], [5])
    simulate(work, deployment(100, **MAX_UTILIZATION))
    with pytest.raises(InputError, match=r'GUARANTEED_NO_EVICT admits .* max_tokens = 512.*"MAX_UTILIZATION"'):
        simulate(work, deployment(100))


def test_other_policies_and_the_rules_of_two_engines_are_refused():
    with pytest.raises(InputError, match='"trtllm" has its own rules instead of a victim; it is'):
        Scheduler(trtllm=TrtllmSettings(), victim="sjf")
    with pytest.raises(InputError, match="give sglang or trtllm, not both"):
        Scheduler(sglang=SglangSettings(), trtllm=TrtllmSettings())
