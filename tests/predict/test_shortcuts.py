"""What is computed in a quicker way for one prompt is the same, to the last bit."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.predict import LEVELS, LengthDistribution, Prompts, default
from lengthwise.predict import features as f
from lengthwise.predict import regressors as t

TEXTS = st.one_of(
    st.text(max_size=300),
    st.text(st.characters(max_codepoint=127), max_size=300),
    st.lists(st.sampled_from(["Ten", "a", "list", "words", "x_y", "```", "\n", "99999", "2", "three", "tips", "é"]))
    .map(" ".join),
)  # fmt: skip


@given(TEXTS)
def test_words_and_marks_are_those_of_the_plain_rules(text: str) -> None:
    lower = text.lower()
    assert f.prompt_words(lower) == re.findall(r"[^\W_]+", lower)
    assert f.mark_counts(text) == [min(text.count(mark), 30) for mark in f.MARKS]


@given(TEXTS)
def test_requested_counts_are_found_word_by_word(text: str) -> None:
    words = f.prompt_words(text.lower())
    tokens, found, largest = 0.0, 0, 0
    for place, word in enumerate(words):
        a_number = word[0] <= "9" and word.isdecimal() and len(word) < 6
        count = f.NUMBERS.get(word) or (int(word) if a_number else 0)
        largest = max(largest, 0 if word in f.NUMBERS else count)
        for what in words[place + 1 : place + 4] if count else ():
            each = f.TOKENS_EACH.get(what) or f.TOKENS_EACH.get(what[:-1])
            if each and count * each < 20_000:
                tokens, found = max(tokens, count * each), found + 1
                break
    reported = np.log1p([tokens, min(largest, 5000)])
    assert f.requested_counts(words, dict.fromkeys(words)) == pytest.approx(
        (reported[0], found, reported[1]), rel=1e-15
    )


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_trees_that_decide_at_once_reach_the_leaves_of_those_that_are_walked(depth: int) -> None:
    rng, nodes = np.random.default_rng(depth), 2**depth - 1
    threshold = np.where(rng.random((40, nodes)) < 0.2, np.inf, rng.normal(size=(40, nodes)))
    trees = t.Trees(0.5, rng.integers(0, 9, (40, nodes)).astype(np.int32), threshold, rng.normal(size=(40, nodes + 1)))
    x = rng.normal(size=(300, 9)).round(1)
    x[::7, 3] = np.nan
    quick = np.concatenate([trees.predict(x[i : i + 3]) for i in range(0, 300, 3)])
    assert quick.tobytes() == trees.predict(x).tobytes()


def test_one_prompt_is_predicted_as_in_a_batch() -> None:
    texts = ["Write 500 words on bees, then ten tips.", "Is 7 prime? yes or no", "", "三 ideas\n```x = 1```"] * 3
    prompts = Prompts(len(texts), texts, None, ["vicuna-13b", "unknown"] * 6)
    batch = default().predict(prompts).tokens
    each = [default().predict(prompts.take(np.array([i]))).tokens[0] for i in range(len(texts))]
    np.testing.assert_allclose(each, batch, rtol=1e-12)


@given(st.lists(st.lists(st.floats(-5, 1e6), min_size=len(LEVELS), max_size=len(LEVELS)), min_size=1, max_size=4))
def test_raw_quantiles_become_the_distribution_that_is_checked(rows) -> None:
    quick = LengthDistribution.of(rows, LEVELS)
    checked = LengthDistribution(np.maximum(np.sort(np.array(rows), axis=1), 1.0), LEVELS.copy())
    assert quick.tokens.tobytes() == checked.tokens.tobytes()
    np.testing.assert_array_equal(quick.mean, checked.mean)


@pytest.mark.parametrize("text", ["What is 5² plus 10³ words?", "1¹ sentence", "3① tips"])
def test_digits_that_are_no_decimals_count_nothing(text: str) -> None:
    assert default().predict(Prompts(1, [text])).mean[0] >= 1
