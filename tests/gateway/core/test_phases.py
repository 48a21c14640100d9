"""Mode rra in front of engines in virtual time: they see the schedule's phases, and no request is held for ever."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from phase_worlds import Job, PhaseWorld, outputs, schedule
from scheduler_worlds import World, request, scheduler, sent, worker
from test_waiting_bound import MAX_WAIT_S, Watched, floods

from lengthwise.gateway.config import Dispatch, Phases
from lengthwise.gateway.core.phases import PrefillBatchSize
from lengthwise.testing.engine_server import Limits


@pytest.mark.parametrize(("prefill_batch", "decode_steps"), [(4, 7), (1, 3), (8, 2), (6, 11)])
def test_an_engine_sees_exactly_the_phases_of_the_schedule(prefill_batch, decode_steps):
    jobs, max_num_seqs = outputs(300, 1, high=60), Limits(512, 1 << 16, num_blocks=1 << 14)
    world = PhaseWorld(schedule(prefill_batch, decode_steps), jobs, loop=160, limits=max_num_seqs).run()
    assert not world.unserved
    cycles = world.batches["w"].cycles
    saturated = cycles[: 120 // prefill_batch]
    assert set(saturated) == {(prefill_batch, decode_steps)}
    reported = [(one.prefill_batch, one.decode_steps) for one in world.phases if one.cause == "steps"]
    assert set(reported[: len(saturated)]) == {(prefill_batch, decode_steps)}


@pytest.mark.parametrize(("seed", "prompt_s"), [(0, 0.0), (1, 0.0), (2, 0.001), (3, 0.001)])
def test_tokens_that_come_in_any_order_count_the_same(seed, prompt_s):
    """Tokens of one iteration take up to a fifth of a step more, each as it comes; prefills are much longer."""
    world = PhaseWorld(schedule(4, 7), outputs(200, seed), loop=60, jitter_s=0.01, seed=seed, prompt_s=prompt_s).run()
    cycles = world.batches["w"].cycles[2:35]
    assert set(cycles) == {(4, 7)}


def test_answers_in_pieces_are_counted_by_their_tokens():
    """All come in pieces of four, each from its own token on: a cycle is what brings everybody eight more."""
    world = PhaseWorld(schedule(4, 8), outputs(200, 5, low=20, high=60, piece=4), loop=80).run()
    steps = [steps for _, steps in world.batches["w"].cycles[3:25]]
    assert all(8 <= one <= 8 + 2 + 2 * 4 for one in steps)
    assert not world.unserved


def test_the_decode_batch_is_what_the_schedule_expects():
    """Outputs of a fixed length need ceil((S - 1) / N_D) phases each."""
    world = PhaseWorld(schedule(4, 7), outputs(200, 5, low=22, high=22), loop=60).run()
    steady = world.phases[6:30]
    assert {one.decode_batch for one in steady} == {12}
    assert {one.remaining_batch for one in steady} == {12}, "four have their last tokens under way"


def test_an_idle_engine_is_filled_at_once_and_a_late_one_waits_for_the_phase():
    made = phased(schedule(2, 3))
    for number in range(3):
        made.offer(0.0, request(number, 0.0))
    assert sent(made.schedule(0.0)) == [0, 1], "nothing runs: a prefill begins"
    for number in range(2):
        made.on_progress(0.1, number, 1)
    assert sent(made.schedule(0.1)) == []
    made.remove(0.2, 0)
    made.remove(0.2, 1)
    over = made.schedule(0.2)
    assert sent(over) == [2], "no request is left: the rest of the phase is not waited for"
    (phase,) = over.phases
    assert (phase.cause, phase.prefill_batch, phase.remaining_batch) == ("idle", 2, 0)


def test_a_request_that_arrives_before_the_first_token_joins_the_prefill():
    made = phased(schedule(3, 4))
    made.offer(0.0, request(1, 0.0))
    assert sent(made.schedule(0.0)) == [1]
    made.offer(0.01, request(2, 0.01))
    assert sent(made.schedule(0.01)) == [2]
    made.on_progress(0.02, 1, 1)
    made.offer(0.03, request(3, 0.03))
    assert sent(made.schedule(0.03)) == [], "its first token ends a prefill"


def test_within_a_phase_the_order_is_the_ranks():
    made = phased(schedule(2, 4), rank="srtf")
    for number, predicted in enumerate([30, 10, 20]):
        made.offer(0.0, request(number, 0.0, predicted=predicted))
    assert sent(made.schedule(0.0)) == [1, 2]


def test_each_engine_keeps_its_own_phases():
    world = PhaseWorld(schedule(3, 6), outputs(300, 2), loop=90, workers=("a", "b")).run()
    for batch in world.batches.values():
        assert set(batch.cycles[:30]) == {(3, 6)}


def test_the_engine_has_never_more_than_the_schedule_lets_it():
    phases = schedule(6, 5, max_requests=13)
    world = PhaseWorld(phases, outputs(200, 4, low=20, high=60), loop=60).run()
    assert world.most["w"] == 13
    assert not world.unserved


def test_the_high_end_of_the_decode_batch_is_a_bound():
    phases = Phases(8, 5, decode_batch=20.0, mean_prompt_tokens=50.0, threshold=0.1)
    world = PhaseWorld(phases, outputs(300, 4, low=10, high=60), loop=100).run()
    assert phases.request_limit == 30
    assert world.most["w"] <= 30
    assert not world.unserved


def test_one_that_never_speaks_is_waited_for_a_little_and_then_no_more():
    made = phased(schedule(2, 3))
    for number in range(8):
        made.offer(0.0, request(number, 0.0))
    waits = stepped(made, silent={0: 1}, steps=40)
    first, *later = waits
    assert 3 <= first <= 3 + 4
    assert set(later) == {3}, "who brought nothing in a whole phase is out of the count"


def test_a_stream_that_stalls_later_does_not_hold_phases_for_ever():
    made = phased(schedule(2, 3))
    for number in range(8):
        made.offer(0.0, request(number, 0.0))
    assert len(stepped(made, silent={1: 6}, steps=60)) >= 3


def test_a_lost_worker_returns_its_requests_and_starts_again():
    made = phased(schedule(2, 50))
    for number in range(4):
        made.offer(0.0, request(number, 0.0))
    assert sent(made.schedule(0.0)) == [0, 1]
    made.on_progress(0.1, 0, 1)
    assert made.update_workers(0.2, [worker(cap=9, epoch=1)]) == (0, 1)
    assert sent(made.schedule(0.2)) == [2, 3], "an empty engine is at the beginning"
    made.requeue(0.3, 0, 1)
    assert sent(made.schedule(0.3)) == []


def told_another(made, now_s, phases):
    made.configure(now_s, made.order, made.admission, Dispatch(phases=phases))


def test_another_schedule_holds_from_the_next_phase_on():
    made = phased(schedule(1, 8))
    for number in range(6):
        made.offer(0.0, request(number, 0.0))
    assert sent(made.schedule(0.0)) == [0]
    made.on_progress(0.1, 0, 5)
    told_another(made, 0.2, schedule(2, 5))
    made.on_progress(0.3, 0, 6)
    assert sent(made.schedule(0.3)) == [], "the phase under way keeps its eight iterations, of which one is late"
    made.on_progress(0.4, 0, 7)
    decisions = made.schedule(0.4)
    assert sent(decisions) == [1, 2]
    assert [(one.cause, one.decode_steps) for one in decisions.phases] == [("steps", 8)]
    for step in range(1, 6):
        assert sent(made.schedule(0.4 + 0.1 * step)) == []
        for number in range(3):
            made.on_progress(0.4 + 0.1 * step, number, step + 7 * (number == 0))
    assert sent(made.schedule(1.0)) == [3, 4]


def test_another_schedule_applies_at_once_to_an_idle_engine():
    made = phased(schedule(1, 8))
    told_another(made, 0.0, schedule(3, 5))
    for number in range(6):
        made.offer(0.0, request(number, 0.0))
    assert sent(made.schedule(0.0)) == [0, 1, 2]


def test_a_lower_slot_limit_applies_from_the_next_phase_on():
    phases = schedule(6, 5, max_requests=24)
    world = PhaseWorld(phases, outputs(300, 4, low=20, high=60), loop=60)
    world.run(until_s=8.0)
    assert world.most["w"] == 24
    told_another(world.scheduler, world.now_s, schedule(4, 5, max_requests=10))
    world.run(until_s=20.0)
    world.most["w"] = 0
    world.run()
    assert world.most["w"] <= 10
    assert not world.unserved


# -- resizing -------------------------------------------------------------------------------------


def jobs_of(prompts, tokens=15):
    return [Job(tokens, prompt_tokens=int(one)) for one in prompts]


def test_prompts_of_a_prefill_stay_near_their_mean():
    dice = np.random.default_rng(3)
    prompts = np.clip(dice.gamma(1.0, 200.0, 300), 1, 2000)
    mean, threshold = float(prompts.mean()), 0.15
    world = PhaseWorld(
        Phases(10, 5, 30.0, mean, threshold, max_requests=400), jobs_of(prompts), loop=150,
        limits=Limits(512, 1 << 20, num_blocks=1 << 16),
    ).run()  # fmt: skip
    fixed = PhaseWorld(
        Phases(10, 5, max_requests=400), jobs_of(prompts), loop=150,
        limits=Limits(512, 1 << 20, num_blocks=1 << 16),
    ).run()  # fmt: skip
    sums, plain = ([one.prompt_tokens for one in w.phases[2:15]] for w in (world, fixed))
    assert np.std(sums) < 0.5 * np.std(plain)
    assert np.mean(sums) == pytest.approx(10 * mean, rel=threshold)
    sizes = {one.prefill_batch for one in world.phases[2:15]}
    assert len(sizes) > 2, "requests are more or fewer instead"


def test_a_small_decode_batch_gets_more_and_a_large_one_fewer():
    phases = Phases(4, 5, decode_batch=20.0, mean_prompt_tokens=50.0, threshold=0.25)
    sizing = PrefillBatchSize(phases)

    def taken(decodes, waiting=100):
        count = 0
        while sizing.admits(count, 50 * count, 50, waiting=waiting - count, decodes=decodes):
            count += 1
        return count

    assert taken(16) == 4
    assert taken(9) == 5, "prompts may be a quarter more than their mean"
    assert taken(22) == 3, "and a quarter fewer"
    assert taken(16, waiting=2) == 2


@settings(max_examples=100)
@given(
    st.integers(1, 12), st.integers(0, 60), st.lists(st.integers(1, 400), min_size=1, max_size=40),
    st.sampled_from([None, 0.0, 0.1, 0.5]),
)  # fmt: skip
def test_a_prefill_takes_what_the_simulators_batching_takes(prefill_batch, decodes, prompts, threshold):
    """The rule of section 5.2, written again from its words."""
    mean, decode_batch = 100.0, 30.0
    sizing = PrefillBatchSize(Phases(prefill_batch, 5, decode_batch, mean, threshold))
    taken, tokens, queue = 0, 0, list(prompts)
    while queue and sizing.admits(taken, tokens, queue[0], waiting=len(queue), decodes=decodes):
        tokens += queue.pop(0)
        taken += 1
    assert taken >= 1
    if threshold is None:
        assert taken == min(prefill_batch, len(prompts))
        return
    low, high = (1 - threshold) * prefill_batch * mean, (1 + threshold) * prefill_batch * mean
    if taken > 1:
        before = tokens - prompts[taken - 1]
        assert tokens <= high + 1e-9 or before < low, "beyond the threshold only from below it"
    wanted = max(prefill_batch, math.ceil((1 - threshold) * decode_batch - 1e-9) - decodes)
    wanted = max(1, min(wanted, math.floor((1 + threshold) * decode_batch + 1e-9) - decodes))
    if taken < min(wanted, len(prompts)):
        assert tokens + prompts[taken] > high - 1e-9, "fewer only where one more would be too much"


# -- no request is held for ever -----------------------------------------------------------------


@st.composite
def lives(draw):
    """Jobs of all kinds: streamed token by token or in pieces, whole, left by their client; engines that die."""
    dice = random.Random(draw(st.integers(0, 1 << 30)))
    jobs, now_s = [], 0.0
    gap_s = draw(st.sampled_from([0.0, 0.05, 0.5]))
    for _ in range(draw(st.integers(5, 40))):
        now_s += gap_s * dice.randrange(3)
        leaves_s = now_s + 3 * dice.random() if dice.random() < 0.2 else math.inf
        jobs.append(
            Job(
                dice.choice([1, 2, 9, 40]), prompt_tokens=dice.choice([5, 200, 900]), piece=dice.choice([1, 1, 3, 16]),
                complete=dice.random() < 0.25, arrival_s=now_s, leaves_s=leaves_s,
            )
        )  # fmt: skip
    deaths = [(dice.random() * 5, dice.choice("ab"), dice.random()) for _ in range(draw(st.integers(0, 3)))]
    return jobs, deaths


@settings(max_examples=60)
@given(lives(), st.integers(1, 6), st.integers(1, 12), st.sampled_from([None, 0.1]), st.booleans())
def test_every_request_is_served_whatever_stalls_leaves_or_dies(life, prefill_batch, decode_steps, threshold, tight):
    """The law of liveness, with no bound on waiting to help."""
    jobs, deaths = life
    phases = Phases(prefill_batch, decode_steps, 3.0 * prefill_batch, 200.0, threshold)
    limits = Limits(4, 256, num_blocks=80) if tight else None  # the engine queues and preempts by itself
    world = PhaseWorld(phases, jobs, workers=("a", "b"), limits=limits)
    for at_s, name, back_s in deaths:
        world.at(at_s, world.dies, name, back_s)
    world.run()
    assert not world.unserved
    assert all(worker.in_flight == 0 for worker in world.scheduler.statistics(world.now_s).workers)
    if phases.request_limit is not None:
        assert max(world.most.values()) <= phases.request_limit


@settings(max_examples=25)
@given(floods(), st.integers(1, 3), st.integers(1, 4), st.integers(1, 200))
def test_the_bound_on_waiting_goes_above_phases(jobs, cap, prefill_batch, decode_steps):
    """Law 29: no request is sent where one could go that has waited max_wait_s."""
    made = phased(Phases(prefill_batch, decode_steps), max_wait_s=MAX_WAIT_S, workers=[worker(cap=cap)])
    world = Watched(made, jobs, [worker(cap=cap)]).run()
    assert all(not math.isnan(job.finished_s) for job in world.jobs.values())


@settings(max_examples=25)
@given(floods(), st.integers(1, 2), st.integers(1, 200))
def test_a_wait_in_phases_is_bounded_as_in_any_mode(jobs, cap, decode_steps):
    """Law 30: max_wait_s, and the time in which the worker ends those in flight and those overdue before it."""
    made = phased(Phases(1, decode_steps), max_wait_s=MAX_WAIT_S, workers=[worker(cap=cap)])
    world = World(made, jobs, [worker(cap=cap)], token_s=0.01).run()
    for job in world.jobs.values():
        before = sum(1 for other in world.jobs.values() if other.request.id < job.request.id)
        max_s = MAX_WAIT_S + 300 * 0.01 * (1 + math.ceil(before / cap))
        assert job.sent_s[0] - job.request.arrival_s <= max_s + 1e-9


def test_an_overdue_request_is_sent_in_the_middle_of_a_phase():
    made = phased(schedule(1, 1000), max_wait_s=2.0)
    for number in range(3):
        made.offer(0.0, request(number, 0.0))
    assert sent(made.schedule(0.0)) == [0]
    made.on_progress(0.1, 0, 1)
    assert sent(made.schedule(1.9)) == []
    assert made.next_s(1.9) == 2.0
    assert sent(made.schedule(2.0)) == [1, 2]
    made.remove(2.1, 0)
    made.remove(2.1, 1)
    made.remove(2.1, 2)
    (phase,) = made.schedule(2.1).phases
    assert (phase.prefill_batch, phase.overdue) == (1, 2)


def test_the_same_events_give_the_same_phases():
    runs = [PhaseWorld(schedule(4, 7), outputs(60, 1), loop=20).run() for _ in range(2)]
    one, other = ([dataclasses.asdict(phase) for phase in run.phases] for run in runs)
    assert one == other


# -- helpers -------------------------------------------------------------------------------------


def phased(phases, *, workers=None, **order):
    given = {"max_wait_s": math.inf} | order
    return scheduler("rra", dispatch=Dispatch(phases=phases), workers=workers or [worker(cap=9)], **given)


def stepped(made, *, silent, steps):
    """Lets all who were sent bring a token a step but for the silent ones; the steps between those that sent."""
    running, at, tokens = set(sent(made.schedule(0.0))), [], {}
    for step in range(1, steps):
        now_s = 0.1 * step
        for one in sorted(one for one in running if step < silent.get(one, steps)):
            tokens[one] = tokens.get(one, 0) + 1
            made.on_progress(now_s, one, tokens[one])
        new = sent(made.schedule(now_s))
        running |= set(new)
        at += [step] if new else []
    return [b - a for a, b in itertools.pairwise([0, *at])]
