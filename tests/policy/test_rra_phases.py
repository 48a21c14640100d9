"""RRA: phases of prefill and decode, observed in the steps of small runs."""

from __future__ import annotations

import numpy as np
import pytest
from worlds import GPU, MODEL, NODE

from lengthwise import policy
from lengthwise.engine import simulate
from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.deployment import Deployment, EngineLimits, KvPlan, Parallelism, Scheduler
from lengthwise.schema.errors import PolicyError
from lengthwise.schema.workload import Workload
from lengthwise.testing import check_policy

ENGINES = pytest.mark.parametrize("engine", ["kernel", "reference"])


def place(batching, stages=1, seqs=64):
    """A pipeline each of whose stages takes a second for any step."""
    one, no = np.ones(2), np.zeros(2)
    cost = CostTables(one, no, no, no, no, no, np.zeros((2, 2)), np.zeros((2, 2)), np.ones(stages, np.int64))
    limits = EngineLimits(max_num_seqs=seqs, watermark=0.0)
    scheduler = Scheduler(batching=batching)
    kv = KvPlan(4096, 16, 0, 0, 0, 0)
    return Deployment(MODEL, GPU, NODE, Parallelism(pp=stages), limits, scheduler, cost, kv, 400)


def at_once(outputs, prompt=10):
    return Workload(np.zeros(len(outputs)), np.full(len(outputs), prompt), np.array(outputs))


def sequence_of(steps):
    """("e" prompts | "d" decodes) of every step, in order."""
    pairs = zip(steps.prefill_seqs.tolist(), steps.decode_seqs.tolist(), strict=True)
    return [f"e{p}" if p else f"d{d}" for p, d in pairs]


@ENGINES
def test_a_prefill_phase_and_so_many_iterations_and_again(engine):
    """B_E = 2, N_D = 3; outputs of 5 tokens need 4 iterations: one phase and one iteration of the next."""
    steps = simulate(at_once([5] * 6), place("rra(prefill_batch=2, decode_steps=3)"), engine=engine).steps
    assert sequence_of(steps) == ["e2", "d2", "d2", "d2", "e2", "d4", "d2", "d2", "e2", "d4", "d2", "d2", "d2"]


@ENGINES
def test_finished_requests_leave_immediately(engine):
    steps = simulate(at_once([2, 3, 5, 9]), place("rra(prefill_batch=4, decode_steps=8)"), engine=engine).steps
    assert sequence_of(steps) == ["e4", "d4", "d3", "d2", "d2", "d1", "d1", "d1", "d1"]


@ENGINES
@pytest.mark.parametrize(("stages", "micro_batches", "parts"), [(3, 0, 3), (3, 2, 2), (2, 9, 2), (4, 1, 1)])
def test_micro_batches_go_round_together(engine, stages, micro_batches, parts):
    """Equal requests: every phase is the prefill of all micro-batches, then N_D rounds of them."""
    text = f"rra(prefill_batch={2 * parts}, decode_steps=4, micro_batches={micro_batches})"
    steps = simulate(at_once([5] * 10 * parts), place(text, stages), engine=engine).steps
    phase = ["e2"] * parts + ["d2"] * 4 * parts
    assert sequence_of(steps) == phase * 5
    assert (np.diff(steps.start_s) >= 0).all()


@ENGINES
def test_decodes_of_a_micro_batch_pause_during_its_prefill(engine):
    """Two micro-batches of requests that outlast three phases: each gets its part of the new ones, none is mixed."""
    batching = "rra(prefill_batch=4, decode_steps=2)"
    steps = simulate(at_once([6] * 12), place(batching, stages=2), engine=engine).steps
    decoding = [sequence_of(steps)[i : i + 6] for i in range(0, 18, 6)]
    assert decoding == [
        ["e2", "e2", "d2", "d2", "d2", "d2"],
        ["e2", "e2", "d4", "d4", "d4", "d4"],
        ["e2", "e2", "d6", "d6", "d4", "d4"],
    ]


@ENGINES
@pytest.mark.parametrize("outputs", [[2, 2, 9, 9], [9, 9, 2, 2]], ids=["first", "last"])
def test_a_micro_batch_that_runs_empty_takes_no_rounds_from_the_others(engine, outputs):
    """Two micro-batches, one of them through after a round: the other has its N_D = 4 all the same."""
    batching = "rra(prefill_batch=4, decode_steps=4)"
    steps = simulate(at_once([*outputs, 5, 5, 5, 5]), place(batching, stages=2), engine=engine).steps
    assert sequence_of(steps)[:9] == ["e2", "e2", "d2", "d2", "d2", "d2", "d2", "e2", "e2"]


@ENGINES
def test_micro_batches_without_new_requests_run_as_many_rounds(engine):
    """Three micro-batches, B_E = 2: who decodes beside the prefill of the others has N_D = 3 rounds, too."""
    batching = "rra(prefill_batch=2, decode_steps=3)"
    steps = simulate(at_once([30] * 12), place(batching, stages=3), engine=engine).steps
    assert sequence_of(steps)[:8] == ["e1", "e1", "d1", "d1", "d1", "d1", "d1", "d1"]
    phases = "".join(one[0] for one in sequence_of(steps)).split("ee")
    assert {len(phase) for phase in phases[2:6]} == {9}


@ENGINES
def test_too_few_are_spread_over_the_micro_batches(engine):
    steps = simulate(at_once([3] * 5), place("rra(prefill_batch=30, decode_steps=2)", 3), engine=engine).steps
    assert sequence_of(steps) == ["e2", "e2", "e1", "d2", "d2", "d1", "d2", "d2", "d1"]


@ENGINES
def test_a_request_that_arrives_mid_phase_waits_for_the_next_phase(engine):
    """One runs from 0 s on; a second comes at 2.5 s, after N_D = 6 iterations of the first it is prefilled, at 7 s."""
    workload = Workload(np.array([0.0, 2.5]), np.array([10, 10]), np.array([20, 1]))
    batching = "rra(prefill_batch=8, decode_steps=6)"
    records = simulate(workload, place(batching), engine=engine)
    assert records.requests.scheduled_s.tolist() == [0, 7]
    alone = simulate(workload, place(batching, stages=4), engine=engine)
    assert alone.requests.scheduled_s[1] == pytest.approx(2.5)  # the prefill phase is still open to three
    assert sequence_of(alone.steps)[:3] == ["e1", "e1", "d1"]


@ENGINES
def test_an_empty_place_begins_a_phase_at_once(engine):
    workload = Workload(np.array([0.0, 50.0]), np.array([10, 10]), np.array([2, 2]))
    r = simulate(workload, place("rra(prefill_batch=8, decode_steps=40)"), engine=engine).requests
    assert r.scheduled_s.tolist() == [0, 50]


STEADY = "rra(prefill_batch=4, decode_steps=3, threshold=0.25, prompt_tokens={tokens}, decode_batch={batch})"


def prompts_of_phases(prompts, outputs, batching, engine, stages=1):
    workload = Workload(np.zeros(len(prompts)), np.array(prompts), np.array(outputs))
    steps = simulate(workload, place(batching, stages), engine=engine).steps
    of = zip(steps.prefill_seqs.tolist(), steps.prefill_tokens.tolist(), strict=True)
    return [(seqs, tokens) for seqs, tokens in of if seqs]


@ENGINES
def test_prompts_of_a_phase_stay_within_the_threshold(engine):
    """75 to 125 tokens: two of 50 are enough, of short ones there are more; one that is too long is alone."""
    prompts = [25] * 4 + [50] * 2 + [60, 60] + [5] * 20 + [300] + [30, 30, 30, 30]
    got = prompts_of_phases(prompts, [4] * len(prompts), STEADY.format(tokens=100, batch=4), engine)
    assert got == [(4, 100), (2, 100), (3, 125), (15, 75), (4, 20), (1, 300), (4, 120)]


@ENGINES
def test_prefill_follows_the_decode_batch_as_far_as_prompts_allow(engine):
    """B_E is 4, of which prompts allow 3 to 5; the decode batch is to be 6 to 10: 5 at first, then 4, at last 3."""
    got = prompts_of_phases([1] * 18, [40] * 18, STEADY.format(tokens=4, batch=8), engine)
    assert [seqs for seqs, _ in got] == [5, 4, 3, 3, 3]


@ENGINES
def test_micro_batches_share_what_a_phase_takes(engine):
    got = prompts_of_phases([25] * 16, [4] * 16, STEADY.format(tokens=100, batch=4), engine, stages=2)
    assert got[:4] == [(2, 50), (2, 50), (2, 50), (2, 50)]


@pytest.mark.parametrize("text", ["rra(prefill_batch=3, decode_steps=2)", STEADY.format(tokens=100, batch=8)])
def test_they_pass_the_kit_for_policies(text):
    assert "kernel_as_reference" in check_policy(policy.resolve("batching", text))


def test_parameters_are_data_and_not_code():
    one, other = (policy.resolve("batching", f"rra(prefill_batch={n}, decode_steps={n})") for n in (3, 70))
    assert policy.compiled(one) is policy.compiled(other)
    assert one.parameters == (3, 3, 0)
    assert one == policy.rra(3, 3)
    assert one.builtin


@pytest.mark.parametrize(
    ("text", "states"),
    [
        ("rra", "prefill_batch"),
        ("rra(prefill_batch=0, decode_steps=1)", "prefill_batch must be a whole number of at least 1"),
        ("rra(prefill_batch=2, decode_steps=1.5)", "whole number"),
        ("rra(prefill_batch=2, decode_steps=1, micro_batches=-1)", "micro_batches must be"),
        ("rra(prefill_batch=2, decode_steps=1, phases=3)", "it takes prefill_batch, decode_steps, micro_batches=0"),
    ],
)
def test_wrong_parameters_are_reported_with_the_right_ones(text, states):
    with pytest.raises(PolicyError, match=states):
        policy.resolve("batching", text)
