"""Prompts on some replicas, decodes on others: timelines by hand, backpressure, links, what is refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lengthwise.engine import deploy, disaggregate, kv_transfer_over, simulate
from lengthwise.schema.cost_tables import CostTables, grid_axis
from lengthwise.schema.deployment import (
    DecodeSide,
    Deployment,
    EngineLimits,
    KVOffloading,
    KvPlan,
    KVTransfer,
    Parallelism,
    Scheduler,
)
from lengthwise.schema.errors import InputError, PolicyError
from lengthwise.schema.records import Rejection, Status
from lengthwise.schema.workload import After, SharedPrefixes, Workload

sys.path.insert(0, str(Path(__file__).parents[1] / "laws"))
from worlds import GPU, MODEL, NODE

from lengthwise import policy

ENGINES = pytest.mark.parametrize("engine", ["kernel", "reference"])
TOKEN_S = 1 / 1024
STEP_S = 1 / 8


def tables(step_s, token_s, stages=1):
    """A step takes ``step_s`` and ``token_s`` a token on each stage, and nothing else costs anything."""
    none, axis = np.zeros(1025), len(grid_axis(1024))
    per_token = step_s + token_s * np.arange(1025)
    nothing = np.zeros((axis, axis))
    return CostTables(per_token, np.zeros(1025), none, none, none, none, nothing, nothing, np.ones(stages, np.int64))


def disaggregated(
    kv_transfer=KVTransfer(), *, free_slots=8, blocks=512, decode_blocks=512, replicas=1, decoders=1, **decode
):
    """Prefill of 1/1024 s a token, one prompt at a time; decode steps of 1/8 s."""
    limits = EngineLimits(max_num_seqs=1, max_num_batched_tokens=1024, block_size=4, watermark=0.0)
    side = DecodeSide(
        Parallelism(replicas=decoders),
        replace(limits, max_num_seqs=free_slots),
        tables(STEP_S, 0.0),
        KvPlan(decode_blocks, 4, 0.0, 0.0, 0.0, 0.0),
        kv_transfer,
        **decode,
    )
    return Deployment(
        MODEL, GPU, NODE, Parallelism(replicas=replicas), limits, Scheduler(batching="mixed"),
        tables(0.0, TOKEN_S), KvPlan(blocks, 4, 0.0, 0.0, 0.0, 0.0), 1024, decode=side,
    )  # fmt: skip


def requests(arrival_s, prompt, output):
    return Workload(np.array(arrival_s, float), np.array(prompt), np.array(output))


@ENGINES
def test_one_request_takes_prefill_transfer_and_decode(engine):
    kv_transfer = KVTransfer(fixed_s=0.25, bytes_per_token=2.0, bytes_per_s=1024.0)
    r = simulate(requests([1.0], [256], [9]), disaggregated(kv_transfer), engine=engine).requests
    assert r.first_token_s[0] == 1.0 + 256 * TOKEN_S
    assert r.finished_s[0] == r.first_token_s[0] + (0.25 + 256 * 2 / 1024) + 8 * STEP_S
    assert r.replica[0] == 1


@ENGINES
def test_without_a_cost_of_handing_over_both_sides_follow_by_hand(engine):
    """Prompts of 1/4, 1/2 and 1/4 s one after the other; decode steps of 1/8 s, joined between steps."""
    r = simulate(requests([0, 0, 0], [256, 512, 256], [4, 3, 1]), disaggregated(), engine=engine).requests
    np.testing.assert_array_equal(r.scheduled_s, [0.0, 0.25, 0.75])
    np.testing.assert_array_equal(r.first_token_s, [0.25, 0.75, 1.0])
    np.testing.assert_array_equal(r.finished_s, [0.25 + 3 / 8, 0.75 + 2 / 8, 1.0])
    np.testing.assert_array_equal(r.replica, [1, 1, 0])
    np.testing.assert_array_equal(r.queued_for_s, [0.0, 0.25, 0.75])


@ENGINES
def test_a_request_that_arrives_during_a_step_joins_the_next_one(engine):
    """The second prompt is through at 5/16, in the middle of the first one's decode step from 1/4 to 3/8."""
    r = simulate(requests([0, 0], [256, 64], [3, 2]), disaggregated(), engine=engine).requests
    np.testing.assert_array_equal(r.finished_s, [0.25 + 2 / 8, 0.375 + 1 / 8])


@ENGINES
def test_a_link_takes_one_request_after_the_other(engine):
    both = requests([0, 0], [256, 256], [2, 2])
    at_once = KVTransfer(1.0, sharing="none")
    serial = simulate(both, disaggregated(KVTransfer(1.0)), engine=engine).requests.finished_s
    np.testing.assert_array_equal(serial, [0.25 + 1 + 1 / 8, 0.25 + 2 + 1 / 8])
    parallel = simulate(both, disaggregated(at_once), engine=engine).requests.finished_s
    np.testing.assert_array_equal(parallel, [0.25 + 1 + 1 / 8, 0.5 + 1 + 1 / 8])


@ENGINES
def test_transfers_that_share_links_divide_the_bandwidth(engine):
    """Two prompts are through at 1/4. Both send to the one decode replica, then the shorter one has been sent."""
    shared = KVTransfer(fixed_s=0.5, bytes_per_token=2.0, bytes_per_s=512.0, sharing="fair")
    r = simulate(requests([0, 0.125], [256, 128], [2, 2]), disaggregated(shared, replicas=2), engine=engine).requests
    np.testing.assert_array_equal(r.first_token_s, [0.25, 0.25])
    np.testing.assert_array_equal(r.finished_s, [0.25 + 1.5 + 0.5 + 1 / 8, 0.25 + 1.0 + 0.5 + 1 / 8])


@ENGINES
def test_transfers_on_links_of_their_own_share_nothing(engine):
    """Each prefill replica sends to another decode replica."""
    shared = KVTransfer(bytes_per_token=2.0, bytes_per_s=512.0, sharing="fair")
    both = disaggregated(shared, replicas=2, decoders=2)
    r = simulate(requests([0, 0], [256, 256], [2, 2]), both, engine=engine).requests
    np.testing.assert_array_equal(r.finished_s, [0.25 + 1.0 + 1 / 8] * 2)
    switched = replace(both.decode, kv_transfer=replace(shared, links_at_once=0.5))
    r = simulate(requests([0, 0], [256, 256], [2, 2]), replace(both, decode=switched), engine=engine).requests
    np.testing.assert_array_equal(r.finished_s, [0.25 + 4.0 + 1 / 8] * 2)


@ENGINES
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_blocks_whose_transfer_waits_too_long_are_freed(engine, policy):
    """One slot to decode. The second prompt is through at 1/2, and its blocks are freed at the step that ends at 3/4.

    It is recomputed as soon as the slot is free, at 1 1/4, in a step of 1/8 s that gives its second token.
    """
    link = KVTransfer(timeout_s=0.25, kv_load_failure_policy=policy)
    records = simulate(requests([0, 0], [256, 256], [9, 3]), disaggregated(link, free_slots=1), engine=engine)
    r, steps = records.requests, records.steps
    assert r.finished_s[0] == 0.25 + 8 / 8
    if policy == "fail":
        assert (r.status[1], r.output_tokens[1]) == (Status.TIMED_OUT, 1)
        return
    assert r.finished_s[1] == 0.25 + 8 / 8 + 2 / 8
    assert steps.prefill_tokens[steps.replica == 1].sum() == 257
    assert r.preemptions[1] == 0


@ENGINES
def test_freed_blocks_admit_another_prompt(engine):
    """The prefill side has room for one prompt, and the decode side for one request."""
    link = KVTransfer(timeout_s=0.25)
    tight = replace(disaggregated(link, free_slots=1, blocks=64), max_model_len=256)
    r = simulate(requests([0] * 3, [240] * 3, [13] * 3), tight, engine=engine).requests
    second_s = 2 * 240 * TOKEN_S
    assert r.first_token_s[1] == second_s
    freed_s = 240 * TOKEN_S + np.ceil((second_s + 0.25 - 240 * TOKEN_S) / STEP_S) * STEP_S
    assert r.scheduled_s[2] == freed_s < r.finished_s[0]


@ENGINES
def test_short_prompts_are_prefilled_where_they_decode(engine):
    """The prompt of 64 tokens takes a decode step of 1/8 s. The one of 256 is prefilled at 1/4 and transferred."""
    local = disaggregated(KVTransfer(1.0), max_local_prefill_length=64)
    records = simulate(requests([0, 0], [256, 64], [3, 3]), local, engine=engine)
    np.testing.assert_array_equal(records.requests.first_token_s, [0.25, 0.125])
    np.testing.assert_array_equal(records.requests.finished_s, [0.25 + 1 + 2 / 8, 3 / 8])
    np.testing.assert_array_equal(records.requests.replica, [1, 1])
    np.testing.assert_array_equal(records.steps.prefill_tokens[records.steps.replica == 1], [64, 0, 0, 0, 0])


@ENGINES
def test_prompts_go_to_the_decode_side_while_the_prefill_queue_is_full(engine):
    """The second prompt waits for the first one. The third finds a queue of 1, and the fourth an empty one again."""
    one_waits = disaggregated(max_prefill_queue_size=1)
    records = simulate(requests([0, 0.0625, 0.125, 0.375], [256] * 4, [2] * 4), one_waits, engine=engine)
    steps = records.steps
    assert steps.prefill_tokens[steps.replica == 1].sum() == 256
    np.testing.assert_array_equal(records.requests.first_token_s, [0.25, 0.5, 0.25, 0.75])


@ENGINES
def test_a_full_decode_side_fills_the_prefill_side_which_then_admits_no_request(engine):
    """One slot to decode; the cache for prompts holds two of 256 tokens: the third waits until one was fetched."""
    full = disaggregated(free_slots=1, blocks=128)
    full = replace(full, max_model_len=512)
    r = simulate(requests([0, 0, 0], [256] * 3, [41] * 3), full, engine=engine).requests
    np.testing.assert_array_equal(r.first_token_s[:2], [0.25, 0.5])
    assert r.finished_s[0] == 0.25 + 40 / 8
    assert r.scheduled_s[2] == 0.5, "the first one's blocks were free at once"
    fourth = simulate(requests([0] * 4, [256] * 4, [41] * 4), full, engine=engine).requests
    assert fourth.scheduled_s[3] == fourth.finished_s[0]


@ENGINES
@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_a_preempted_request_is_prefilled_again_or_swapped(engine, preemption_mode):
    short = disaggregated(decode_blocks=128, preemption_mode=preemption_mode)
    short = replace(short, max_model_len=512)
    records = simulate(requests([0, 0], [252, 252], [100, 100]), short, engine=engine)
    r, steps = records.requests, records.steps
    assert (r.status == Status.FINISHED).all()
    assert r.preemptions.sum() >= 1
    again = steps.prefill_tokens.sum() - r.prompt_tokens.sum()
    assert (again > 0) == (preemption_mode == "recompute")
    assert (steps.prefill_seqs[steps.replica == 1] == 0).all()


@ENGINES
def test_routers_of_both_sides_pick_among_their_own(engine):
    sides = disaggregated(replicas=2, decoders=3, router="least_outstanding")
    records = simulate(requests([0] * 12, [64] * 12, [30] * 12), sides, engine=engine)
    assert set(records.requests.replica.tolist()) == {2, 3, 4}
    assert set(records.steps.replica.tolist()) == {0, 1, 2, 3, 4}
    assert len(records.totals.steps) == 5


def sessions(count, turns, prompt_tokens, output_tokens):
    """``count`` sessions of ``turns`` turns each; a turn adds ``prompt_tokens`` and the output of the turn before."""
    n, turn = count * turns, np.repeat(np.arange(turns), count)
    parents = np.arange(n) - count
    start = np.concatenate([[0], np.cumsum(parents >= 0)])
    prompt = prompt_tokens + turn * (prompt_tokens + output_tokens)
    before = np.where(parents >= 0, parents, -1)
    return Workload(
        np.zeros(n), prompt, np.full(n, output_tokens),
        after=After(start, parents[parents >= 0], np.full(n, 0.1)),
        prefixes=SharedPrefixes(4, np.zeros(n + 1, int), np.zeros(0, int), before),
    )  # fmt: skip


@ENGINES
@pytest.mark.parametrize("output_tokens", [1, 5])
def test_the_turns_of_a_session_return_to_their_replicas_of_both_sides(engine, output_tokens):
    sides = disaggregated(replicas=3, decoders=2, blocks=1024, router="session_affinity")
    sides = replace(sides, scheduler=replace(sides.scheduler, router="session_affinity", batching="unified"))
    sides = replace(sides, limits=replace(sides.limits, enable_prefix_caching=True))
    workload = sessions(7, 4, 40, output_tokens)
    records = simulate(workload, sides, engine=engine)
    r = records.requests
    assert (r.status == Status.FINISHED).all()
    # The prefill replica has the prompt of the turn before, but not the output.
    assert r.cached_tokens[7:].tolist() == (workload.prompt_tokens[:-7] // 4 * 4).tolist()
    if output_tokens > 1:
        decoders = r.replica.reshape(4, 7)
        assert (decoders == decoders[0]).all()
        assert set(decoders[0].tolist()) == {3, 4}


@ENGINES
def test_a_turn_without_decode_does_not_lose_the_decode_replica_of_its_session(engine):
    sides = disaggregated(decoders=3, router="session_affinity")
    workload = sessions(5, 3, 40, 5)
    output = np.where(np.arange(15) // 5 == 1, 1, 5)
    workload = replace(workload, output_tokens=output)
    decoders = simulate(workload, sides, engine=engine).requests.replica.reshape(3, 5)
    assert (decoders[1] == 0).all()
    assert decoders[2].tolist() == decoders[0].tolist()
    assert len(set(decoders[0].tolist())) == 3


@ENGINES
def test_sessions_that_only_a_column_names_return_too(engine):
    one_side = replace(disaggregated(replicas=3), decode=None)
    one_side = replace(one_side, scheduler=replace(one_side.scheduler, router="session_affinity"))
    session = np.array([4, 9, -1, 4, 9, 4, -1, 9, 4])
    workload = replace(requests(np.arange(9) / 50, [30] * 9, [9] * 9), extra={"session": session})
    replica = simulate(workload, one_side, engine=engine).requests.replica
    assert [len(set(replica[session == one].tolist())) for one in (4, 9)] == [1, 1]
    assert workload.previous_turn.tolist() == [-1, -1, -1, 0, 1, 3, -1, 4, 5]


def test_littles_law_holds_for_the_decode_side():
    """Sequences in a step are rate x time in steps; an arrival waits for half a step in the mean (PASTA)."""
    rng = np.random.default_rng(3)
    n, kv_transfer = 3000, KVTransfer(0.125, sharing="none")
    workload = requests(np.cumsum(rng.exponential(0.4, n)), rng.integers(1, 300, n), rng.integers(2, 60, n))
    records = simulate(workload, disaggregated(kv_transfer, free_slots=64, decode_blocks=8192))
    r, steps = records.requests, records.steps
    assert not r.preemptions.any()
    decoding = steps.replica == 1
    busy_s = (steps.end_s - steps.start_s)[decoding]
    batch = (busy_s * steps.decode_seqs[decoding]).sum() / records.end_s
    assert batch == pytest.approx(n / records.end_s * STEP_S * (r.output_tokens - 1).mean())
    joins_s = r.finished_s - r.first_token_s - 0.125 - STEP_S * (r.output_tokens - 1)
    assert joins_s.min() >= -1e-9
    assert joins_s.max() <= STEP_S + 1e-9
    assert joins_s.mean() == pytest.approx(STEP_S / 2 * busy_s.sum() / records.end_s, rel=0.05)


@policy.router
def lost(request_number):
    return 7


@ENGINES
def test_an_error_of_a_router_of_the_decode_side_is_reported(engine):
    with pytest.raises(PolicyError, match="router 'lost' chose replica 7; there are 1"):
        simulate(requests([0], [16], [4]), disaggregated(router=lost), engine=engine)


@ENGINES
def test_a_request_that_the_decode_side_could_never_hold_is_rejected(engine):
    tight = disaggregated(memory="paged_strict", decode_blocks=256)
    tight = replace(tight, decode=replace(tight.decode, limits=replace(tight.decode.limits, watermark=0.5)))
    r = simulate(requests([0, 0], [600, 100], [4, 4]), tight, engine=engine).requests
    assert r.status.tolist() == [Status.REJECTED, Status.FINISHED]
    assert r.rejection[0] == Rejection.REFUSED_BY_MEMORY_POLICY


def test_what_cannot_work_is_refused():
    one = requests([0], [16], [4])
    with pytest.raises(InputError, match="central"):
        simulate(one, replace(disaggregated(), scheduler=Scheduler(router="central")))
    with pytest.raises(InputError, match="block_size"):
        simulate(one, apart_blocks_of_8())
    with pytest.raises(
        PolicyError, match=r'decode replicas cache none: .* Take "session_affinity", "least_outstanding"'
    ):
        simulate(sessions(2, 2, 8, 2), disaggregated(router="uncached_load"))
    limits = replace(disaggregated().limits, enable_prefix_caching=True, kv_offloading=KVOffloading(9.0, outputs=True))
    with pytest.raises(InputError, match=r"kv_offloading.outputs stores .* leave outputs out, or take out decode"):
        simulate(one, replace(disaggregated(), limits=limits))
    with pytest.raises(InputError, match="fixed_s"):
        KVTransfer(-1.0)
    with pytest.raises(InputError, match="bytes_per_s"):
        KVTransfer(bytes_per_s=0.0)
    with pytest.raises(
        InputError, match=r"decode.max_prefill_queue_size must be a whole number of at least 1; it is 0"
    ):
        disaggregated(max_prefill_queue_size=0)
    with pytest.raises(InputError, match="layers of a KV transfer must be a whole number of at least 0; it is -1"):
        KVTransfer(layers=-1)
    with pytest.raises(InputError, match="kv_transfer_timeout must be above 0"):
        KVTransfer(timeout_s=0.0)
    with pytest.raises(InputError, match=r"no kv_load_failure_policy named 'retry'"):
        KVTransfer(kv_load_failure_policy="retry")
    with pytest.raises(InputError, match=r"no link_sharing named 'fairly'\. Did you mean: fair"):
        KVTransfer(sharing="fairly")
    with pytest.raises(InputError, match=r'switch_gb_per_s, which needs decode.link_sharing = "fair"; it is "fcfs"'):
        KVTransfer(links_at_once=2.0)
    with pytest.raises(InputError, match="links_at_once of a KV transfer must be above 0; it is 0"):
        KVTransfer(sharing="fair", links_at_once=0)
    with pytest.raises(InputError, match="max_in_flight"):
        EngineLimits(max_in_flight=0)


def apart_blocks_of_8():
    sides = disaggregated()
    return replace(sides, decode=replace(sides.decode, kv=replace(sides.decode.kv, block_size=8)))


def test_two_deployments_become_one():
    limits = EngineLimits(max_model_len=8192)
    prefill = deploy("llama-3.1-8b", "H100", limits=limits)
    decode = deploy("llama-3.1-8b", "H100", tp=2, replicas=2, limits=limits)
    both_sides = disaggregate(prefill, decode)
    assert both_sides.gpus == 5
    assert both_sides.price_per_hour_usd == pytest.approx(5 * prefill.gpu.price_per_hour_usd)
    assert both_sides.decode.kv_transfer == kv_transfer_over(prefill.node.link, prefill, decode)
    kv_bytes = 2 * 32 * 8 * 128 * 2  # keys and values, layers, KV heads, dimensions, bytes
    assert both_sides.decode.kv_transfer.bytes_per_token == kv_bytes
    assert kv_transfer_over(None, prefill, decode).bytes_per_token == kv_bytes * 1.5
    with pytest.raises(InputError, match="one model"):
        disaggregate(prefill, deploy("opt-125m", "H100"))
    with pytest.raises(InputError, match="decode side"):
        disaggregate(both_sides, decode)


@ENGINES
def test_even_micro_batches_stay_alike(engine):
    """Eight decode in a pipeline of two stages; without shares new ones join the larger batch in the end."""
    workload = requests(np.arange(200) * 0.06, [16] * 200, [100] * 200)
    sizes = {}
    for batching in ("unified", "even"):
        sides = disaggregated(free_slots=200, blocks=4096, decode_blocks=8192, batching=batching)
        pipeline = replace(
            sides.decode,
            parallel=Parallelism(pp=2),
            cost=tables(STEP_S / 16, STEP_S / 16, stages=2),
            limits=replace(sides.decode.limits, max_in_flight=2),
        )
        steps = simulate(workload, replace(sides, decode=pipeline), engine=engine).steps
        seqs = steps.decode_seqs[(steps.replica == 1) & (steps.start_s > 6) & (steps.start_s < 12)]
        sizes[batching] = np.abs(np.diff(seqs)).mean() / seqs.mean()
    assert sizes["even"] < 0.1
    assert sizes["even"] < sizes["unified"]
