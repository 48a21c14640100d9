"""The seconds of prompts alone equal those of the simulator's steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise import deploy
from lengthwise.cost import prompt_seconds
from lengthwise.engine.step_time import step_time

PROMPTS = st.lists(st.tuples(st.integers(1, 9000), st.floats(0, 1)), min_size=1, max_size=8)


@pytest.mark.parametrize("pp", [1, 2])
@settings(max_examples=20, deadline=None)
@given(PROMPTS, st.sampled_from([300, 2048]))
def test_each_chunk_is_a_step(pp, prompts, budget):
    cost = deploy("llama-3.2-1b", "A100-80GB", pp=pp).cost
    tokens = np.array([prompt for prompt, _ in prompts])
    cached = np.array([int(share * prompt) for prompt, share in prompts])
    seconds, expected = step_time(cost), []
    for prompt, done in zip(tokens.tolist(), cached.tolist(), strict=True):
        total = 0.0
        while done < prompt:
            chunk = min(budget, prompt - done)
            total += seconds(0, 0, [(chunk, done)])
            done += chunk  # noqa: PLW2901 - the tokens so far
        expected.append(total)
    np.testing.assert_allclose(prompt_seconds(cost, tokens, cached, budget), expected, rtol=1e-9)
