"""Every built-in policy: compiled and interpreted alike, and doing what its name states."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lengthwise import policy
from lengthwise.engine import deploy, simulate
from lengthwise.policy import (
    ADMIT_AFTER_PREEMPTION,
    CHUNKED,
    DECODES_WAIT,
    FORM_ONCE,
    ONE_BATCH,
    PADDED,
    RESERVE_BLOCK,
    RESTART_AS_DECODE,
    UNIFORM_SHARES,
)
from lengthwise.policy.contracts import ARGUMENTS, ROUTER_ARRAYS
from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.deployment import Deployment, EngineLimits, KvPlan, Parallelism, Scheduler
from lengthwise.schema.errors import PolicyError, UnknownNameError
from lengthwise.schema.workload import Workload

AXES = ("rank", "batching", "memory", "router", "preemption", "binning")
BUILT_IN = [p for axis in AXES for p in policy.known(axis).values()]
COUNT = st.integers(0, 10_000)
REALS = (
    "now_s", "arrival_s", "predicted_tokens", "gittins_rank", "queued_for_s", "service_tokens", "waiting_key",
    "running_key", "recompute_steps",
)  # fmt: skip
REMAINING = ("remaining_tokens", "waiting_remaining_tokens", "running_remaining_tokens")
ATLEAST_ONE = (
    "prompt_tokens",
    "total_blocks",
    "block_size",
    "max_model_len",
    "max_num_seqs",
    "token_budget",
    "context_tokens",
    "chunk_tokens",
)


def argument(axis, name, replicas):  # noqa: PLR0911 - by name
    if name == "service_rate":
        return st.lists(st.floats(0.01, 100), min_size=replicas, max_size=replicas).map(np.array)
    if axis == "router" and name in ROUTER_ARRAYS:
        return st.lists(COUNT, min_size=replicas, max_size=replicas).map(lambda x: np.array(x, np.int64))
    if name == "previous_replica":
        return st.integers(-1, replicas - 1)
    if name in ("draw_a", "draw_b"):
        return st.floats(0, 1, exclude_max=True)
    if name in REALS:
        return st.floats(0, 1e6)
    if name in REMAINING:
        return st.floats(1, 1e6)
    return st.integers(1, 10_000) if name in ATLEAST_ONE else COUNT


@st.composite
def calls(draw, axis):
    replicas = draw(st.integers(1, 8))
    return [draw(argument(axis, name, replicas)) for name in ARGUMENTS[axis]]


def of(axis, name, **given_arguments):
    """The result of a built-in policy; arguments that are not given are 0."""
    function = policy.interpreted(policy.known(axis)[name])
    return function(*[given_arguments.get(argument, 0) for argument in ARGUMENTS[axis]])


@pytest.mark.parametrize("built_in", BUILT_IN, ids=lambda p: f"{p.axis}-{p.name}")
def test_compiled_and_interpreted_agree(built_in):
    compiled, interpreted = policy.compiled(built_in), policy.interpreted(built_in)

    @settings(max_examples=25, deadline=None, database=None)
    @given(calls(built_in.axis))
    def agree(arguments):
        assert compiled(*arguments) == interpreted(*arguments)

    agree()


@pytest.mark.parametrize("built_in", BUILT_IN, ids=lambda p: f"{p.axis}-{p.name}")
def test_every_policy_describes_what_it_does(built_in):
    assert built_in.builtin
    assert built_in.doc.endswith(".")
    rows = [doc for axis, name, doc in policy.catalog() if (axis, name) == (built_in.axis, built_in.name)]
    assert len(rows) == 1
    assert rows[0].startswith(built_in.doc)
    assert policy.resolve(built_in.axis, built_in.name) is built_in
    assert policy.resolve(built_in.axis, built_in) is built_in


def test_every_router_has_its_own_description() -> None:
    docs = [doc for axis, _, doc in policy.catalog() if axis == "router"]
    assert len(set(docs)) == len(docs)


ORDERS = {
    "fcfs": "abcd",
    "fcfs_preempted_first": "dcab",
    "queue_order": "abcd",
    "sjf": "cadb",
    "ljf": "bdac",
    "shortest_prompt": "dbca",
    "srtf": "cdab",
    "priority": "bdac",
    "latest_admitted": "bcda",
    "latest_arrival": "abcd",
    "longest_remaining": "cdab",
    "lowest_priority": "bdca",
    "gittins": "badc",
    "hrrn": "dacb",
    "vtc": "dbac",
    "completed_batches": "bdac",
}
NUMBERS = ("remaining_tokens", "gittins_rank", "queued_for_s", "service_tokens", "batch")
MORE = {
    "a": (20.0, 5.0, 4.0, 10.0, 2),
    "b": (80.0, 1.0, 4.0, 5.0, 1),
    "c": (6.0, 9.0, 1.0, 20.0, 2),
    "d": (9.0, 7.0, 9.0, 1.0, 1),
}
WAITING = {
    "a": {"arrival_s": 1.0, "prompt_tokens": 90, "predicted_tokens": 20.0, "priority": 3, "admission": 9},
    "b": {"arrival_s": 2.0, "prompt_tokens": 20, "predicted_tokens": 80.0, "priority": 0, "admission": 2},
    "c": {
        "arrival_s": 3.0, "prompt_tokens": 50, "predicted_tokens": 10.0, "generated_tokens": 4,
        "priority": 3, "admission": 5, "last_preemption": 1,
    },
    "d": {
        "arrival_s": 4.0, "prompt_tokens": 10, "predicted_tokens": 50.0, "generated_tokens": 41,
        "priority": 1, "admission": 7, "last_preemption": 2,
    },
}  # fmt: skip


def test_orders_worked_by_hand():
    assert set(ORDERS) == set(policy.known("rank"))
    waiting = {q: WAITING[q] | dict(zip(NUMBERS, MORE[q], strict=True)) for q in WAITING}
    for name, order in ORDERS.items():
        found = sorted(waiting, key=lambda q, name=name: of("rank", name, **waiting[q]))
        assert "".join(found) == order, name


PLANS = {
    "static": (0, 1 << 60, DECODES_WAIT),
    "static_bins": (0, 1 << 60, DECODES_WAIT + ONE_BATCH),
    "windowed": (0, 1 << 60, 0),
    "prefill_first": (8, 64, DECODES_WAIT + RESERVE_BLOCK),
    "mixed": (8, 1 << 60, 0),
    "chunked": (8, 64, CHUNKED),
    "unified": (8, 64, CHUNKED),
    "even": (8, 64, CHUNKED + UNIFORM_SHARES),
    "vidur_vllm": (8, 64, PADDED + DECODES_WAIT + RESERVE_BLOCK + FORM_ONCE),
    "vidur_sarathi": (8, 64, CHUNKED + RESERVE_BLOCK + ADMIT_AFTER_PREEMPTION + FORM_ONCE + RESTART_AS_DECODE),
}


def test_plans_worked_by_hand():
    assert set(PLANS) == set(policy.known("batching"))
    for name, plan in PLANS.items():
        assert of("batching", name, decodes=3, num_waiting=5, num_running=3, token_budget=64, max_num_seqs=8) == plan
    assert of("batching", "static", num_waiting=5, token_budget=64, max_num_seqs=8)[0] == 8
    assert of("batching", "static", prefills=1, num_waiting=5, max_num_seqs=8)[0] == 0
    assert of("batching", "windowed", num_waiting=5, max_num_seqs=8)[0] == 8
    assert of("batching", "windowed", num_running=3, steps_since_admit=49, max_num_seqs=8)[0] == 0
    assert of("batching", "windowed", num_running=3, steps_since_admit=50, max_num_seqs=8)[0] == 8
    assert of("batching", "windowed", num_running=3, ended_since_admit=1, max_num_seqs=8)[0] == 8


ASK = {"context_tokens": 33, "chunk_tokens": 10, "max_model_len": 100, "block_size": 16, "total_blocks": 20}


@pytest.mark.parametrize(
    ("name", "more", "blocks"),
    [
        ("reserve_max", {"free_blocks": 7}, 7),
        ("reserve_max", {"free_blocks": 6}, -1),
        ("vidur_reserve_max", {"free_blocks": 6}, 6),
        ("vidur_reserve_max", {"free_blocks": 5}, -1),
        ("paged", {"free_blocks": 5, "watermark_blocks": 2, "num_running": 1}, 3),
        ("paged", {"free_blocks": 4, "watermark_blocks": 2, "num_running": 1}, -1),
        ("paged", {"free_blocks": 4, "watermark_blocks": 2, "num_running": 0}, 3),
        ("paged", {"free_blocks": 2}, -1),
        ("paged_by_chunk", {"free_blocks": 5, "watermark_blocks": 2, "num_running": 1}, 1),
        ("paged_by_chunk", {"free_blocks": 2}, -1),
        ("paged_strict", {"free_blocks": 4, "watermark_blocks": 2}, -1),
        ("paged_strict", {"free_blocks": 5, "watermark_blocks": 2}, 3),
        ("predicted_peak", {"free_blocks": 9, "num_running": 1, "peak_tokens": 320}, 3),
        ("predicted_peak", {"free_blocks": 9, "num_running": 1, "peak_tokens": 321}, -1),
        ("predicted_peak", {"free_blocks": 9, "num_running": 0, "peak_tokens": 321}, 3),
        ("predicted_peak", {"free_blocks": 2, "num_running": 0}, -1),
    ],
)
def test_admissions_worked_by_hand(name, more, blocks):
    assert of("memory", name, **ASK, **more) == blocks


@settings(deadline=None)
@given(calls("memory"), st.sampled_from(sorted(policy.known("memory"))))
def test_memory_policies_never_take_more_than_is_free(arguments, name):
    request = dict(zip(ARGUMENTS["memory"], arguments, strict=True))
    blocks = policy.interpreted(policy.known("memory")[name])(*arguments)
    assert -1 <= blocks <= request["free_blocks"]
    if name in ("paged", "paged_strict", "predicted_peak") and blocks >= 0:
        assert blocks == math.ceil(request["context_tokens"] / request["block_size"])


@settings(deadline=None)
@given(calls("router"), st.sampled_from(sorted(set(policy.known("router")) - {"central"})))
def test_routers_choose_a_replica_that_exists(arguments, name):
    choice = policy.interpreted(policy.known("router")[name])(*arguments)
    assert 0 <= choice < len(arguments[-1])


def test_routes_worked_by_hand():
    load = {
        "waiting": np.array([3, 0, 1, 2]), "running": np.array([0, 9, 2, 1]), "tokens": np.array([40, 30, 50, 20]),
    }  # fmt: skip
    assert [of("router", "round_robin", request_number=i, **load) for i in range(6)] == [0, 1, 2, 3, 0, 1]
    assert [of("router", "random", draw_a=u, **load) for u in (0.0, 0.3, 0.5, 0.99)] == [0, 1, 2, 3]
    assert of("router", "least_outstanding", **load) == 0, "3 each at 0, 2 and 3: the lowest number"
    assert of("router", "least_waiting", **load) == 1
    assert of("router", "least_tokens", **load) == 3
    assert of("router", "power_of_two", draw_a=0.3, draw_b=0.6, **load) == 2
    assert of("router", "power_of_two", draw_a=0.8, draw_b=0.1, **load) == 3, "equal loads: the first drawn"
    assert of("router", "central", **load) == -1
    free = {"total_blocks": 100, "free_blocks": np.array([60, 10, 50, 50]), **load}
    turns = [of("router", "vllm_internal", request_number=i, **free) for i in range(5)]
    assert turns == [0, 2, 2, 3, 0], "3 each at 0, 2 and 3: the first from the request's turn on"
    free["free_blocks"] = np.array([0, 10, 20, 25])  # 3 + 9, 9, 3 + 1.8, 3 + 3
    assert [of("router", "vllm_internal", request_number=i, **free) for i in range(4)] == [2] * 4
    for prefix_tokens, chosen in ([0, 0, 0, 0], 3), ([0, 0, 50, 0], 2), ([0, 50, 0, 0], 1), ([0, 20, 0, 0], 3):
        # per replica: (requests + 1) (tokens + 100) is 560, 1300, 600, 480
        prefix = {"prompt_tokens": 100, "prefix_tokens": np.array(prefix_tokens)}
        assert of("router", "uncached_load", **prefix, **load) == chosen


def second_a_step(batching, budget=16, **more):
    """A deployment on which every step takes a second."""
    from worlds import GPU, MODEL, NODE

    one, no = np.ones(2), np.zeros(2)
    cost = CostTables(one, no, no, no, no, no, np.zeros((2, 2)), np.zeros((2, 2)), np.array([1]))
    limits = EngineLimits(max_num_seqs=4, max_num_batched_tokens=budget, watermark=0.0)
    scheduler = Scheduler(batching=batching, memory="paged", **more)
    return Deployment(
        MODEL, GPU, NODE, Parallelism(), limits, scheduler, cost, KvPlan(64, 16, 0, 0, 0, 0), max_model_len=100
    )


A_THEN_B = Workload(np.array([0.0, 1.5]), np.array([10, 10]), np.array([5, 3]))
BATCHES = {
    "static": [(10, 0), (0, 1), (0, 1), (0, 1), (0, 1), (10, 0), (0, 1), (0, 1)],
    "static_bins": [(10, 0), (0, 1), (0, 1), (0, 1), (0, 1), (10, 0), (0, 1), (0, 1)],
    "windowed": [(10, 0), (0, 1), (0, 1), (0, 1), (0, 1), (10, 0), (0, 1), (0, 1)],
    "prefill_first": [(10, 0), (0, 1), (10, 0), (0, 2), (0, 2), (0, 1)],
    "vidur_vllm": [(10, 0), (0, 1), (10, 0), (0, 2), (0, 2), (0, 1)],
    "mixed": [(10, 0), (0, 1), (10, 1), (0, 2), (0, 2)],
    "chunked": [(8, 0), (2, 0), (7, 1), (3, 1), (0, 2), (0, 2)],
    "unified": [(8, 0), (2, 0), (7, 1), (3, 1), (0, 2), (0, 2)],
    "even": [(8, 0), (2, 0), (7, 1), (3, 1), (0, 2), (0, 2)],
    "vidur_sarathi": [(8, 0), (2, 0), (7, 1), (3, 1), (0, 2), (0, 2)],
}


@pytest.mark.parametrize("engine", ["kernel", "reference"])
def test_steps_worked_by_hand(engine):
    """(prompt tokens, decodes) of each step: b arrives while a decodes."""
    assert set(BATCHES) == set(policy.known("batching"))
    for name, batches in BATCHES.items():
        budget = 8 if batches[0][0] == 8 else 16
        steps = simulate(A_THEN_B, second_a_step(name, budget), engine=engine).steps
        got = zip(steps.prefill_tokens.tolist(), steps.decode_seqs.tolist(), strict=True)
        assert list(got) == batches, name
        assert steps.end_s.tolist() == list(range(1, len(batches) + 1))


def test_a_padded_batch_counts_its_longest_prompt():
    """Prompts of 10 and 3 under a budget of 16: 13 tokens, or 20 with padding."""
    workload = Workload(np.zeros(2), np.array([10, 3]), np.array([1, 1]))
    plain, padded = (simulate(workload, second_a_step(name)).steps for name in ("prefill_first", "vidur_vllm"))
    assert plain.prefill_tokens.tolist() == [13]
    assert padded.prefill_tokens.tolist() == [10, 3]


@pytest.mark.parametrize(
    ("axis", "wrong", "near"),
    [
        ("rank", "fcsf", "fcfs"),
        ("victim", "latest_arival", "latest_arrival"),
        ("batching", "unifed", "unified"),
        ("memory", "pagd", "paged"),
        ("router", "roundrobin", "round_robin"),
        ("preemption", "worth_t", "worth"),
        ("binning", "bin", "bins"),
    ],
)
def test_unknown_names_list_the_nearest(axis, wrong, near):
    for engine in ("kernel", "reference"):
        deployment = second_a_step("unified")
        scheduler = Scheduler(**{axis: wrong})
        with pytest.raises(UnknownNameError, match=f"no {axis} policy named '{wrong}'.*{near}"):
            simulate(A_THEN_B, Deployment(**{**vars(deployment), "scheduler": scheduler}), engine=engine)


def test_unknown_schedulers_and_preemptions_list_the_known():
    with pytest.raises(UnknownNameError, match=r"no scheduler named 'vllm'.*vllm_v"):
        policy.scheduler("vllm")
    deployment = second_a_step("unified", preemption_mode="swop")
    with pytest.raises(UnknownNameError, match=r"no preemption mode named 'swop'.*swap"):
        simulate(A_THEN_B, deployment)


def test_named_schedulers_are_points_on_the_axes():
    for name, chosen in policy.named().items():
        assert policy.scheduler(name) is chosen
        for axis in ("rank", "victim", "batching", "memory", "router", "preemption"):
            text = getattr(chosen, axis)
            assert policy.resolve(axis, text).name.partition("(")[0] == text.partition("(")[0]
        assert chosen.binning is None or policy.resolve("binning", chosen.binning).bins >= 1
    with pytest.raises(PolicyError, match="one of axis 'memory'"):
        policy.resolve("rank", policy.known("memory")["paged"])


@given(st.integers(1, 200), st.integers(2, 100), st.integers(1, 6), st.integers(0, 60), st.integers(1, 15))
def test_vllm_v1_admits_a_request_only_if_its_complete_prompt_fits(first, output, spare, more, own):
    """The rule of vLLM's scheduler_reserve_full_isl: that blocks for the first chunk are free is not enough."""
    total = -(-(first + output) // 16) + spare  # a chunk of the second request always fits next to the first one
    least = 16 * (total - -(-first // 16)) + 1  # the shortest prompt that does not, as long as the first one runs
    second = min(least + more, 16 * total - own)
    assume(second >= least)
    limits = EngineLimits(max_num_seqs=4, max_num_batched_tokens=16, block_size=16)
    deployed = deploy("llama-3.1-8b", "H100", limits=limits, num_blocks=total, scheduler="vllm_v1")
    sent = Workload(np.zeros(2), np.array([first, second]), np.array([output, own]))
    requests = simulate(sent, deployed, engine="reference").requests
    assert np.isfinite(requests.finished_s).all()
    assert requests.scheduled_s[1] >= requests.finished_s[0]
    fits = replace(sent, prompt_tokens=np.array([first, min(16 * spare, second)]))
    requests = simulate(fits, deployed, engine="reference").requests
    assert requests.scheduled_s[1] < requests.finished_s[0]
