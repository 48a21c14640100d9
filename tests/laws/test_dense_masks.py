"""What attention costs that masks every query against the keys of the whole batch."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from observers import LAW, run
from worlds import cost_tables, deployments, workloads

from lengthwise.engine.step_time import step_time
from lengthwise.schema.cost_tables import MERGED, PER_REQUEST

MASKED_S = 1e-7
RULES = st.sampled_from([PER_REQUEST, MERGED])
PROMPTS = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 500)), max_size=4)


def more_s(rule, decodes, kv_tokens, prompts):
    """The seconds that masks add to a step of four layers."""
    tables = cost_tables([4], rule)
    masked = dataclasses.replace(tables, masked_s=MASKED_S)
    return step_time(masked)(decodes, kv_tokens, prompts) - step_time(tables)(decodes, kv_tokens, prompts)


def with_masks(deployment, masked_s):
    return dataclasses.replace(deployment, cost=dataclasses.replace(deployment.cost, masked_s=masked_s))


@given(RULES, st.integers(0, 12), st.integers(1, 400), PROMPTS)
def test_every_query_pays_for_the_keys_of_all_other_sequences(rule, decodes, each, prompts):
    """Pair by pair, as a dense mask of the whole step is laid out."""
    sequences = [(1, each)] * decodes + [(chunk, context + chunk) for chunk, context in prompts]
    pairs = sum(
        queries * keys for i, (queries, _) in enumerate(sequences) for j, (_, keys) in enumerate(sequences) if i != j
    )
    reported = more_s(rule, decodes, decodes * each, prompts)
    assert np.isclose(reported, 4 * MASKED_S * pairs, rtol=1e-9, atol=1e-12)


@given(RULES, st.integers(1, 12), st.integers(1, 400), PROMPTS)
def test_a_longer_cache_of_others_costs_more(rule, decodes, each, prompts):
    steps = [more_s(rule, decodes, decodes * each + more, [*prompts, (8, 0)]) for more in (0, 100)]
    assert steps[1] > steps[0]


@LAW
@given(workloads(), deployments())
def test_a_batch_of_one_pays_nothing_for_masks(workload, deployment):
    limits = dataclasses.replace(deployment.limits, max_num_seqs=1, max_step_seqs=None)
    alone = dataclasses.replace(deployment, limits=limits)
    none, some = (run(workload, with_masks(alone, masked_s)) for masked_s in (0.0, MASKED_S))
    for name in ("scheduled_s", "first_token_s", "finished_s"):
        np.testing.assert_array_equal(getattr(some.requests, name), getattr(none.requests, name), name)
    assert some.end_s == none.end_s
