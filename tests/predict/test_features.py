"""What features say: sizes, counts that are asked for, progress, and no text that breaks them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.predict.features import (
    NAMES,
    PROGRESS,
    is_mathematics,
    progress_features,
    prompt_features,
    requested_items,
    score,
    terms,
    text_so_far,
)


def feature(text: str, name: str) -> float:
    return float(prompt_features([text])[0][0, NAMES.index(name)])


def progress(text: str, name: str, so_far: int = 50, requested: int = 0) -> float:
    return float(progress_features(np.array([so_far]), [text], [requested])[0, PROGRESS.index(name)])


@given(st.lists(st.text(max_size=400), max_size=5))
def test_any_text_gives_finite_numbers_of_the_same_columns(texts) -> None:
    rows, words = prompt_features(texts)
    assert rows.shape == (len(texts), len(NAMES))
    assert np.isfinite(rows).all()
    assert all(math.isfinite(score(read, dict.fromkeys(terms(read), 1.0))) for read in words)
    so_far = np.arange(1, len(texts) + 1)
    assert np.isfinite(progress_features(so_far, texts, [0] * len(texts))).all()


@given(st.lists(st.text(max_size=60), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_a_prompt_has_the_same_features_in_any_batch(texts, random) -> None:
    order = list(range(len(texts)))
    random.shuffle(order)
    rows = prompt_features(texts)[0]
    np.testing.assert_allclose(prompt_features([texts[i] for i in order])[0], rows[order], rtol=1e-12)


def test_the_score_is_the_sum_of_the_terms_weights() -> None:
    words = prompt_features(["write a poem a poem"])[1][0]
    weights = {term: float(i + 1) for i, term in enumerate(terms(words))}
    assert score(words, weights) == pytest.approx(sum(weights.values()))
    assert score([], weights) == 0


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Write 500 words on bees", 675),
        ("Give three short sentences", 72),
        ("Two paragraphs, then 10 tips", 400),
        ("In 1999 he left", 0),
        ("Answer in one word", 1.35),
        ("", 0),
    ],
)
def test_requested_counts_are_recognized(text, tokens) -> None:
    assert math.expm1(feature(text, "requested_log_tokens")) == pytest.approx(tokens)


def test_a_long_pasted_text_costs_little_and_counts_by_length() -> None:
    long = "Summarize:\n" + "word " * 100_000
    assert feature(long, "log_chars") == pytest.approx(math.log1p(len(long)))
    assert len(prompt_features([long])[1][0]) < 1000


def test_scripts_are_distinguished() -> None:
    assert feature("写一篇关于春天的文章", "cjk_share") > 0.9
    assert feature("Напиши рассказ", "foreign_share") > 0.9
    assert feature("Write a story", "foreign_share") == 0
    assert feature("SHOUT", "upper_share") == 1


def test_a_guess_orders_what_anybody_would() -> None:
    requests = ["Answer yes or no: is it wet?", "What is a lake?", "Write a detailed essay about lakes."]
    guesses = [feature(text, "guess") for text in requests]
    assert guesses == sorted(guesses)


def test_progress_reads_lists_code_and_endings() -> None:
    text = "Here are 5 reasons:\n1. One\n2. Two\n3. Three"
    assert requested_items(["give", "5", "reasons"]) == 5
    assert progress(text, "last_number", requested=5) == 3
    assert progress(text, "items_to_come", requested=5) == 2
    assert progress(text, "items_to_come") == -2
    assert progress(text, "opens 'here are'") == 1
    assert progress("```python\nx = 1", "in_code") == 1
    assert progress("```python\nx = 1\n```", "in_code") == 0
    assert progress("That is all. I hope this helps!", "closes 'i hope'") == 1
    assert progress("That is all.", "ends_sentence") == 1
    assert progress("That is", "ends_sentence") == 0
    assert progress("again " * 80, "fresh_words") < 0.05


def test_without_a_text_only_the_tokens_so_far_are_given() -> None:
    row = progress_features(np.array([50]), None, [0])[0]
    assert row[0] == pytest.approx(math.log(50))
    assert not row[1:].any()


@given(st.text(min_size=1, max_size=200), st.integers(1, 100), st.integers(0, 100))
def test_the_text_so_far_is_a_beginning_of_the_output(text, tokens, so_far) -> None:
    part = text_so_far(text, tokens, so_far)
    assert text.startswith(part)
    assert (part == text) >= (so_far >= tokens)


@pytest.mark.parametrize(
    ("text", "requests"),
    [
        ("Natalia sold 48 clips in April and half as many in May. How many clips did she sell altogether?", True),
        ("Find the sum of all integers that satisfy \\[ |x| + 1 > 7 \\text{ and } |x + 1| \\le 7 \\].", True),
        ("A robe takes 2 bolts of blue fiber and half that much white. How many bolts does it take?", True),
        ("Calculate the following: (2 * 3 + 4) / 5", True),
        ("Write a python function to find the 2 largest of 10 numbers.", False),
        ("How much does a cup of coffee cost in Rome?", False),
        ("Write an essay about the rivers of Europe in 500 words.", False),
        ("", False),
    ],
)
def test_mathematics_is_distinguished_from_other_prompts(text, requests):
    assert is_mathematics(text) == requests
