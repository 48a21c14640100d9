"""Laws of speculative decoding: how many tokens a step gives, and how acceptance varies."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lengthwise.engine import simulate
from lengthwise.schema.deployment import KvPlan, Parallelism
from lengthwise.schema.records import Status
from lengthwise.schema.speculation import Speculation, accepted, uniform
from lengthwise.schema.workload import After, SharedPrefixes, Workload

sys.path.insert(0, str(Path(__file__).parent))
from sides import speculating_sides
from test_kernel_agrees import assert_same
from worlds import GPU, MODEL, NODE, cost_tables, speculation_worlds

from lengthwise.policy import scheduler
from lengthwise.schema.deployment import DecodeSide, Deployment, EngineLimits

EXAMPLES = int(os.environ.get("LENGTHWISE_EXAMPLES", "100")) // 2


def deployment(chosen: Speculation | None, *, seqs: int = 64, max_len: int = 4000) -> Deployment:
    """One replica with memory for all requests."""
    limits = EngineLimits(max_num_seqs=seqs, max_num_batched_tokens=seqs * 10)
    kv = KvPlan(seqs * max_len, 16, 0.0, 0.0, 0.0, 0.0)
    tables, parallel = cost_tables([2]), Parallelism(1, 1, 1)
    return Deployment(MODEL, GPU, NODE, parallel, limits, scheduler("vllm_v1"), tables, kv, max_len, speculation=chosen)


def requests(n: int, output: int, prompt: int = 8) -> Workload:
    return Workload(np.zeros(n), np.full(n, prompt), np.full(n, output))


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(speculation_worlds() | speculating_sides(), st.integers(0, 3))
def test_every_request_gets_exactly_its_output(world, seed):
    workload, made = world
    found = simulate(workload, made, seed=seed)
    finished = found.requests.status == Status.FINISHED
    output = np.minimum(workload.output_tokens, np.maximum(made.max_model_len - workload.prompt_tokens, 1))
    np.testing.assert_array_equal(found.requests.output_tokens[finished], output[finished])
    totals = found.speculation
    assert (totals.accepted_tokens <= totals.draft_tokens).all()
    if not found.requests.preemptions.any() and finished.all():  # a recomputed prompt gives one token, too
        decoded = found.requests.output_tokens.sum() - len(workload)
        assert totals.decodes.sum() + totals.accepted_tokens.sum() == decoded


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    st.integers(1, 6), st.integers(1, 60), st.integers(1, 60), st.integers(1, 40), st.sampled_from([0.0, 1.0]),
    st.sampled_from(["ngram", "eagle"]),
)  # fmt: skip
def test_the_next_turn_finds_what_was_known_when_the_last_step_was_formed(k, prompt, output, own, rate, method):
    made = deployment(Speculation(method, k, rate))
    made = dataclasses.replace(made, limits=dataclasses.replace(made.limits, enable_prefix_caching=True))
    turns = SharedPrefixes(16, np.zeros(3, np.int64), np.zeros(0, np.int64), np.array([-1, 0]))
    lengths = np.array([prompt, prompt + output + own])
    after, both = After(np.array([0, 0, 1]), np.array([0]), np.zeros(2)), np.array([output, 1])
    found = simulate(Workload(np.zeros(2), lengths, both, prefixes=turns, after=after), made)
    last = 1 + (output - 2) % (1 + k) if rate == 1.0 and output > 1 else 1  # tokens that the last step gave
    blocks = (prompt + output - last) // 16
    assert found.requests.cached_tokens[1] == 16 * max(0, blocks - (method == "eagle"))


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(1, 6), st.integers(1, 60), st.integers(1, 40), st.sampled_from([0.0, 1.0]), st.booleans())
def test_all_or_nothing_accepted_gives_the_fewest_or_the_most_steps(k, n, output, rate, is_split):
    """On a decode side, no tokens are proposed for the first step, since no step of its drafter was before."""
    made, first = deployment(Speculation("ngram", k, rate)), is_split and output > 1
    if is_split:
        side = DecodeSide(made.parallel, made.limits, made.cost, made.kv, speculation=made.speculation)
        made = dataclasses.replace(made, decode=side)
    found = simulate(requests(n, output), made)
    steps_of_each = first + -(-(output - 1 - first) // (1 + k)) if rate == 1.0 else output - 1
    assert found.speculation.decodes.sum() == n * steps_of_each
    assert not is_split or found.speculation.decodes[0] == 0


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(speculation_worlds() | speculating_sides(), st.integers(0, 3))
def test_nothing_proposed_is_no_speculation(world, seed):
    workload, made = world
    chosen, found = dataclasses.replace(made.speculation, method="ngram", per_batch_size=((1, 1, 0),)), []
    for one in (chosen, None):
        side = dataclasses.replace(made.decode, speculation=one) if made.decode else None
        found.append(simulate(workload, dataclasses.replace(made, speculation=one, decode=side), seed=seed))
    assert_same(*(dataclasses.replace(one, speculation=None) for one in found))


def test_the_mean_number_of_tokens_is_the_closed_form():
    rates = (0.8, 0.6, 0.4)
    for draft_rate, burstiness in ((1.0, 0.0), (0.5, 0.0), (0.7, 0.6)):
        chosen = Speculation("ngram", 3, rates, draft_rate=draft_rate, burstiness=burstiness)
        found = simulate(requests(400, 500), deployment(chosen, seqs=256), seed=1).speculation
        expected = 1 + draft_rate * (0.8 + 0.8 * 0.6 + 0.8 * 0.6 * 0.4)
        assert chosen.tokens_per_step == np.float64(expected) or abs(chosen.tokens_per_step - expected) < 1e-12
        decodes = found.decodes.sum()
        # The sum of n numbers from 0 to 3, whose correlation falls by ``burstiness`` from step to step.
        bound = 5 * 1.5 * np.sqrt((1 + burstiness) / (1 - burstiness) / decodes)
        assert abs(found.tokens_per_step - expected) < bound + 3 / 200  # the last step of a request is cut
        assert abs(found.draft_tokens.sum() / (3 * decodes) - draft_rate) < bound


def test_the_stated_rates_are_means_over_steps_however_requests_differ():
    """Requests with few hits take more steps: as many as their outputs need."""
    rates, n = (0.16, 0.81, 0.85), 60 if os.environ.get("NUMBA_DISABLE_JIT") == "1" else 4000
    output = np.random.default_rng(4).integers(100, 900, n)
    for effect, tied, draft_rate in ((0.14, 0.0, 1.0), (0.6, 0.0, 1.0), (0.3, 0.6, 0.5), (0.3, -0.6, 1.0)):
        chosen = Speculation("ngram", 3, rates, draft_rate=draft_rate, request_effect=effect, length_correlation=tied)
        work = Workload(np.zeros(n), np.full(n, 8), output)
        found = simulate(work, deployment(chosen, seqs=256), seed=2).speculation
        spread = np.sqrt(effect * chosen.hit_rate * (1 - chosen.hit_rate)) * chosen.survival.sum()  # between requests
        assert abs(found.tokens_per_step - chosen.tokens_per_step) < 5 * spread / np.sqrt(n) + 3 / np.sqrt(22.5 * n)
        assert abs(found.draft_tokens.sum() / (3 * found.decodes.sum()) - draft_rate) < max(0.02, 3 / np.sqrt(300 * n))


def draws(chosen: Speculation, n: int, steps: int) -> np.ndarray:
    """How many tokens each of the first steps of n requests accepts, as the reference draws them: [n, steps]."""
    rng = np.random.default_rng(3)
    rates, keys = chosen.hit_rates(np.arange(n), rng), rng.integers(2**32, size=n)
    found = np.zeros((n, steps), np.int64)
    for i in range(n):
        tokens, hit = 1, None
        for step in range(steps):
            rate = float(rates[i])
            rate += chosen.burstiness * (hit - rate) if hit is not None else 0.0
            found[i, step] = accepted(
                uniform(int(keys[i]), tokens), rate, chosen.survival, chosen.num_speculative_tokens
            )
            tokens, hit = tokens + 1 + found[i, step], found[i, step] > 0
    return found


def test_the_request_effect_is_the_correlation_within_requests():
    for effect in (0.02, 0.2):
        hits = draws(Speculation("ngram", 2, (0.4, 0.5), request_effect=effect), 2000, 60) > 0
        between = hits.mean(axis=1).var(ddof=1) - hits.var(axis=1, ddof=1).mean() / hits.shape[1]
        found = between / (between + hits.var(axis=1, ddof=1).mean())
        assert abs(found - effect) < 0.15 * effect + 0.005


def test_burstiness_is_the_correlation_of_consecutive_steps():
    hits = draws(Speculation("ngram", 2, (0.3, 0.5), burstiness=0.6), 500, 200) > 0
    assert abs(hits.mean() - 0.3) < 0.02
    found = np.corrcoef(hits[:, :-1].ravel(), hits[:, 1:].ravel())[0, 1]
    assert abs(found - 0.6) < 0.03


def test_steps_for_which_nothing_is_to_be_proposed_do_not_end_a_burst():
    """With a burstiness of 1, all proposed tokens of a request are accepted or none, also after steps of two."""
    chosen = Speculation("ngram", 1, 0.5, burstiness=1.0, per_batch_size=((1, 1, 1), (2, 2, 0)))
    alone, accepts = simulate(requests(1, 400), deployment(chosen)), set()
    for seed in range(20):
        work = Workload(np.array([0.0, alone.end_s / 4]), np.array([8, 8]), np.array([400, 30]))
        found = simulate(work, deployment(chosen), seed=seed).speculation
        decodes, drafts, taken = found.decodes.sum(), found.draft_tokens.sum(), found.accepted_tokens.sum()
        assert decodes > drafts + 50, "steps of two sequences"
        assert taken == 0 or taken >= drafts - 1, "the last step of a request is cut"
        accepts.add(bool(taken))
    assert accepts == {False, True}


def test_a_request_with_longer_output_accepts_more_with_length_correlation():
    chosen = Speculation("ngram", 1, 0.4, request_effect=0.2, length_correlation=0.6)
    output = np.random.default_rng(1).integers(1, 1000, 4000)
    rates = chosen.hit_rates(output, np.random.default_rng(2))
    ranks = [np.argsort(np.argsort(column)) for column in (output, rates)]
    assert abs(np.corrcoef(*ranks)[0, 1] - 0.6) < 0.05  # Spearman's is a little below the normal scores' 0.6
    steps = output / (1 + rates)
    assert abs(np.average(rates, weights=steps) - 0.4) < 0.02


def test_random_numbers_are_uniform_and_independent():
    values = np.array([[uniform(key, counter) for counter in range(200)] for key in range(7, 100_000, 399)])
    assert abs(values.mean() - 0.5) < 0.01
    counts = np.histogram(values, 20, (0, 1))[0]
    expected = values.size / 20
    assert ((counts - expected) ** 2 / expected).sum() < 50  # chi-squared with 19 degrees of freedom
    for rows, shifted in ((values[:, :-1], values[:, 1:]), (values[:-1], values[1:])):
        assert abs(np.corrcoef(rows.ravel(), shifted.ravel())[0, 1]) < 0.02
