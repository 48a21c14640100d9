"""The steady state of RRA phases: sums that must hold, and draws that bear them out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.schedule import TaskLengths
from lengthwise.schedule.lengths import paper_completions, phase_loads, phase_position
from lengthwise.schema.errors import InputError


@st.composite
def tasks(draw):
    longest = draw(st.integers(1, 30))
    weights = draw(st.lists(st.floats(0.0, 1.0), min_size=longest - 1, max_size=longest - 1))
    pmf = np.array([0.0, *weights, 1.0])
    return TaskLengths([0.0, 0.25, 0.0, 0.75], pmf / pmf.sum())


@given(tasks(), st.integers(1, 30), st.sampled_from([0, 1]))
def test_completions_of_a_phase_are_what_enters_it(task, steps, prefill_output_tokens):
    steps = min(steps, task.max_output_tokens)
    share = phase_loads(task, steps, prefill_output_tokens)
    entering = task.decode_survival(prefill_output_tokens)[:1].sum()
    completions = paper_completions(task, steps, prefill_output_tokens)
    assert completions.min() >= 0
    seqs = phase_loads(task, steps, prefill_output_tokens, paper=True).seqs
    assert seqs[0] * completions.sum() == pytest.approx(entering)
    phases = -(-np.arange(len(task.output_pmf) - prefill_output_tokens) // steps)
    mean_phases = float(task.output_pmf[prefill_output_tokens:] @ phases)
    assert share.seqs[0] == pytest.approx(mean_phases)


@given(tasks(), st.integers(1, 30), st.sampled_from([0, 1]))
def test_the_papers_completions_are_no_fewer_than_the_renewals(task, steps, prefill_output_tokens):
    steps = min(steps, task.max_output_tokens)
    paper = paper_completions(task, steps, prefill_output_tokens).sum()
    start = phase_loads(task, steps, prefill_output_tokens).seqs[0]
    entering = task.decode_survival(prefill_output_tokens)[:1].sum()
    assert paper >= (entering / start if start else 0.0) - 1e-12


def test_the_papers_completions_by_hand():
    """Lengths 2 and 5 with N_D = 3: one completes at 2; the other at 2 of the second of two phases."""
    task = TaskLengths.from_samples([1], [2, 5, 5, 5])
    np.testing.assert_allclose(paper_completions(task, 3), [0.0, 0.25 + 0.75 / 2, 0.0])


def test_outputs_of_one_length_fill_complete_phases():
    share = phase_loads(TaskLengths.fixed(100, 8), 3, 1)
    np.testing.assert_allclose(share.seqs, [3.0, 2.0, 2.0])
    np.testing.assert_allclose(share.kv_tokens, [3 * 100 + 1 + 4 + 7, 2 * 100 + 2 + 5, 2 * 100 + 3 + 6])
    np.testing.assert_array_equal(share.seqs_variance, 0.0)
    np.testing.assert_allclose(share.kv_variance, 0.0, atol=1e-9)


def test_draws_of_many_phases_have_the_expected_batch_context_and_variances():
    task, steps, new = TaskLengths.from_samples([20, 60], [1, 3, 4, 9, 11]), 4, 5
    rng = np.random.default_rng(5)
    phases = 20_000
    needs = rng.choice([1, 3, 4, 9, 11], (phases, new)) - 1
    prompts = rng.choice([20, 60], (phases, new))
    seqs, tokens = np.zeros((phases, steps)), np.zeros((phases, steps))
    for ago in range(3):
        for u in range(1, steps + 1):
            age = ago * steps + u
            alive = np.roll(needs, ago, axis=0) >= age
            seqs[:, u - 1] += alive.sum(axis=1)
            tokens[:, u - 1] += (alive * (np.roll(prompts, ago, axis=0) + age)).sum(axis=1)
    share = phase_loads(task, steps, 1)
    np.testing.assert_allclose(seqs.mean(axis=0), new * share.seqs, rtol=0.01)
    np.testing.assert_allclose(tokens.mean(axis=0), new * share.kv_tokens, rtol=0.01)
    np.testing.assert_allclose(seqs.var(axis=0), new * share.seqs_variance, rtol=0.04)
    np.testing.assert_allclose(tokens.var(axis=0), new * share.kv_variance, rtol=0.04)


def test_one_decode_a_phase_has_as_many_sequences_as_iterations(summaries):
    assert phase_loads(summaries, 1, 0).seqs[0] == pytest.approx(summaries.mean_output_tokens)


@pytest.mark.parametrize(("iterations", "expected"), [(0, (1, 0)), (1, (1, 1)), (7, (1, 7)), (8, (2, 1)), (63, (9, 7))])
def test_a_request_finishes_in_the_phase_that_has_its_last_iteration(iterations, expected):
    assert phase_position(7, iterations) == expected


@pytest.mark.parametrize("steps", [0, 81])
def test_more_decode_steps_than_the_longest_output_are_refused(summaries, steps):
    with pytest.raises(InputError, match="from 1 to the longest output"):
        phase_loads(summaries, steps)
