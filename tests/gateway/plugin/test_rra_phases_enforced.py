"""Steps of an engine held to an RRA schedule: batches and iterations exact, nothing lost, no request starved."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rra_world import Clock, Engine, Request

from lengthwise import EngineLimits, Workload, deploy, simulate
from lengthwise.gateway.plugin import RraSettings
from lengthwise.gateway.plugin.rra_scheduler import PhasedScheduler, PhaseHooks
from lengthwise.schema.deployment import Scheduler


class PhasedEngine(PhasedScheduler, Engine):
    pass


def with_phases(prefill_batch, decode_steps, *, world=None, **settings):
    made = PhasedEngine(**world or {})
    made.lengthwise = PhaseHooks(RraSettings(prefill_batch, decode_steps, **settings), Clock())
    return made


def filled(made, lengths):
    """(prompt, output) a request."""
    requests = [Request(f"r{k}", prompt, output) for k, (prompt, output) in enumerate(lengths)]
    for one in requests:
        made.add_request(one)
    return requests


def complete(requests):
    return all(one.output == list(range(one.max_tokens)) for one in requests)


LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=40)


@given(LENGTHS, st.integers(1, 9), st.integers(1, 12), st.sampled_from([7, 40, 1 << 20]))
def test_with_room_for_all_every_phase_has_its_batch_and_its_iterations(lengths, batch, steps, budget):
    made = with_phases(batch, steps, world={"budget": budget})
    requests = filled(made, lengths)
    made.run()
    assert complete(requests)
    phases, left = list(made.lengthwise.tracker.phases), len(lengths)
    assert [one.number for one in phases] == list(range(1, len(phases) + 1))
    for phase in phases:
        assert phase.admitted == min(batch, left) == len(phase.requests)
        left -= phase.admitted
        assert phase.decode_steps <= steps or not left, "longer only when no request waits"
    assert left == 0
    assert sum(one.prompt_tokens for one in phases) == sum(prompt for prompt, _ in lengths)
    assert sum(one.decode_seqs for one in phases) == sum(output - 1 for _, output in lengths)
    assert all(not (reads and decodes) for reads, decodes in made.log), "no step does both"


@given(LENGTHS, st.integers(1, 9), st.integers(1, 12))
def test_phases_end_early_only_when_no_request_decodes(lengths, batch, steps):
    made = with_phases(batch, steps)
    filled(made, lengths)
    while made.requests:
        before = made.lengthwise.tracker.current
        done = before.decode_steps if before else 0
        decoding, waiting = len(made.running), len(made.waiting)
        made.step()
        if made.lengthwise.tracker.current is not before and decoding and waiting:
            assert done >= steps


@pytest.mark.parametrize("budget", [1 << 20, 96])
@pytest.mark.parametrize("threshold", [None, 0.1])
def test_phases_are_those_of_the_simulator(budget, threshold):
    """The same requests, all there from the beginning: the same prompts and decodes, step by step."""
    rng = np.random.default_rng(5)
    lengths = [(int(p), int(o)) for p, o in zip(rng.integers(5, 60, 80), rng.integers(1, 40, 80), strict=True)]
    more = {} if threshold is None else {"threshold": threshold, "prompt_tokens": 195, "decode_batch": 17}
    settings = RraSettings(6, 9, **more)
    made = with_phases(6, 9, world={"budget": budget}, **more)
    filled(made, lengths)
    made.run()
    merged = []  # vLLM cuts a prefill into steps; the simulator's is one
    for reads, decodes in made.log:
        if reads and merged and merged[-1][0]:
            continue
        merged.append((reads, decodes))
    limits = EngineLimits(max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=1024, watermark=0.0)
    deployment = deploy("llama-2-7b", "a100-80", limits=limits, num_blocks=10_000)
    deployment = dataclasses.replace(deployment, scheduler=Scheduler(batching=settings.policy().name))
    workload = Workload(np.zeros(80), *np.array(lengths).T)
    steps = simulate(workload, deployment, engine="reference").steps
    other = list(zip(steps.prefill_seqs.tolist(), steps.decode_seqs.tolist(), strict=True))
    assert [decodes for _, decodes in merged] == [0 if reads else decodes for reads, decodes in other]
    phases = list(made.lengthwise.tracker.phases)
    assert [one.admitted for one in phases] == [reads for reads, _ in other if reads]
    if threshold is not None:
        assert len({one.admitted for one in phases}) > 2, "batches were resized"


@given(
    LENGTHS,
    st.integers(1, 9),
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(5, 60),
    st.integers(72, 200),
    st.lists(st.integers(0, 400), max_size=6),
    st.sampled_from([None, 0.0, 0.2]),
)
def test_with_few_slots_little_memory_and_aborts_every_token_comes_once(
    lengths, batch, steps, max_num_seqs, budget, cache, aborts, threshold
):
    made = with_phases(
        batch, steps, world={"max_num_seqs": max_num_seqs, "budget": budget, "cache_tokens": cache},
        threshold=threshold, prompt_tokens=20 * batch, decode_batch=2 * batch,
    )  # fmt: skip
    requests, aborted = [], set()
    coming = [Request(f"r{k}", prompt, output) for k, (prompt, output) in enumerate(lengths)]
    for k in range(20_000):
        if coming and k % 3 == 0:
            requests.append(coming.pop(0))
            made.add_request(requests[-1])
        if k in aborts and made.requests:
            aborted.add(max(made.requests))
            made.finish_requests(max(made.requests))
        made.step()
        if not coming and not made.requests:
            break
    assert made.lengthwise is not None
    assert not made.requests
    assert complete([one for one in requests if one.request_id not in aborted])
    assert made.max_num_active_reqs == max_num_seqs
    assert all(one.next_decode_eligible_step == 0 for one in requests)
    assert all(phase.admitted <= batch for phase in made.lengthwise.tracker.phases) or threshold is not None


def test_slots_bound_the_batch_and_finished_requests_are_replaced_at_the_next_prefill():
    made = with_phases(6, 4, world={"max_num_seqs": 8})
    filled(made, [(5, 10)] * 24)
    made.run()
    phases = list(made.lengthwise.tracker.phases)
    # Two slots are left for the second phase; at the third no request has ended, at the fourth the first six have.
    assert [one.admitted for one in phases[:5]] == [6, 2, 0, 6, 2]
    assert [one.decode_batch for one in phases[:4]] == [6, 8, 8, 8]
    assert all(one.decode_steps == 4 for one in phases[:4])


def test_a_chunked_prompt_blocks_decoding_until_it_is_complete():
    made = with_phases(2, 3, world={"budget": 10})
    filled(made, [(35, 20), (8, 20), (35, 20), (8, 20)])
    made.run()
    assert made.log[:5] == [(1, 0), (1, 0), (1, 0), (2, 0), (1, 0)]
    assert made.log[5:8] == [(0, 2)] * 3
    assert made.lengthwise.tracker.phases[0].prefill_steps == 5


def test_a_request_that_comes_late_waits_for_the_next_prefill():
    made = with_phases(4, 6)
    filled(made, [(5, 30)])
    for _ in range(3):
        made.step()
    late = Request("late", 5, 3)
    made.add_request(late)
    for _ in range(4):
        made.step()
        assert late in made.waiting
    made.step()
    assert late in made.running


def test_a_paused_engine_goes_by_its_own_rules():
    made = with_phases(1, 6)
    filled(made, [(5, 30)] * 3)
    made.pause_state = 1
    made.step()
    assert made.log == [(3, 0)]
    made.pause_state = 0
    made.run()
    assert len(made.finished) == 3


def test_an_engine_that_passes_decodes_over_is_not_waited_for():
    """Whatever holds its decodes back, those who wait are let in."""

    class Lame(PhasedEngine):
        def schedule(self, *args):
            for one in self.running:
                one.next_decode_eligible_step = 1 << 40 if one.request_id == "r0" else 0
            return super().schedule(*args)

    made = Lame()
    made.lengthwise = PhaseHooks(RraSettings(1, 8), Clock())
    requests = filled(made, [(5, 30), (5, 3), (5, 3)])
    for _ in range(200):
        made.step()
    assert made.finished == ["r1", "r2"]
    assert complete(requests[1:])


def test_phases_are_recorded_a_line_each(tmp_path):
    path = tmp_path / "phases.jsonl"
    made = with_phases(3, 4, record=str(path))
    filled(made, [(7, 9)] * 6)
    made.run()
    made.shutdown()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["number"] for row in rows] == [1, 2]
    assert rows[0] == {
        "number": 1,
        "started_s": 1.0,
        "admitted": 3,
        "prompt_tokens": 21,
        "prefill_steps": 1,
        "prefill_s": 1.0,
        "decode_steps": 4,
        "decode_batch": 3,
        "decode_seqs": 12,
        "decode_s": 1.0,
        "requests": ["r0", "r1", "r2"],
    }
    assert (rows[1]["decode_batch"], rows[1]["decode_steps"]) == (6, 8), "no request waits: decoding goes on"
    assert made.closed


def test_a_record_that_cannot_be_written_stops_and_the_schedule_goes_on(caplog):
    made = with_phases(3, 4, record="/dev/full")
    requests = filled(made, [(7, 9)] * 6)
    made.run()
    assert complete(requests)
    assert [one.decode_steps for one in made.lengthwise.tracker.phases] == [4, 8]
    assert caplog.text.count("phases are no longer recorded") == 1
