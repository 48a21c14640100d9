"""The lexical predictor: what it learns, that it is honest, and what it does with bad samples."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.predict import Prompts, Samples, load, save
from lengthwise.predict.distribution import LEVELS
from lengthwise.predict.evaluation import kendall
from lengthwise.predict.features import text_so_far
from lengthwise.predict.lexical import Lexical, template_weights
from lengthwise.predict.lexical_model import imputed, residual_quantiles
from lengthwise.predict.regressors import Trees, fit_trees
from lengthwise.schema.errors import InputError, LengthwiseError

REQUESTS = {
    "Name the capital of": 8,
    "Explain the history of": 180,
    "Write an essay about": 600,
    "List 5 facts about": 90,
}
PLACES = [f"{a} {b}" for a in ("old", "new", "far", "cold") for b in ("Rome", "Peru", "Chad", "Oslo", "Bern")]


def samples(models=("short", "long"), *, seed=0, cap=None, spread=0.3) -> Samples:
    """Every ask of every place by every model; the second is twice as long as the first."""
    rng = np.random.default_rng(seed)
    rows = [
        (f"{ask} {place}?", m, n * 2**i)
        for ask, n in REQUESTS.items()
        for place in PLACES
        for i, m in enumerate(models)
    ]
    tokens = np.maximum(1, [round(n * np.exp(spread * rng.normal())) for _, _, n in rows])
    cut = np.zeros(len(rows), bool)
    if cap is not None:
        cut, tokens = tokens >= cap, np.minimum(tokens, cap)
    prompts = Prompts(len(rows), text=[t for t, _, _ in rows], model=[m for _, m, _ in rows])
    output = ["word and more. " * (n // 3) + "In conclusion, done." for n in tokens]
    return Samples(prompts, tokens.astype(np.int64), cut, output)


@pytest.fixture(scope="module")
def learnt() -> Lexical:
    return Lexical(max_windows=1500).fit(samples())


def test_it_orders_prompts_and_knows_models(learnt) -> None:
    fresh = samples(seed=1)
    message = learnt.predict(fresh.prompts)
    assert kendall(message.median, fresh.output_tokens) > 0.75
    ask = Prompts(2, text=["Explain the history of Rome?"] * 2, model=["short", "org/LONG"])
    short, long = learnt.predict(ask).median
    assert 1.6 < long / short < 2.4
    assert learnt.knows_model("org/long")
    assert not learnt.knows_model("other")


def test_nine_in_ten_are_inside_its_interval(learnt) -> None:
    fresh = samples(seed=2)
    message = learnt.predict(fresh.prompts)
    inside = (message.quantile(0.05) <= fresh.output_tokens) & (fresh.output_tokens <= message.quantile(0.95))
    assert 0.84 < inside.mean() < 0.96


def test_a_model_it_has_not_seen_is_less_certain(learnt) -> None:
    known = learnt.predict(Prompts(1, text=["Explain the history of Rome?"], model=["short"]))
    other = learnt.predict(Prompts(1, text=["Explain the history of Rome?"], model=["other"]))
    width = [float(d.quantile(0.95)[0] / d.quantile(0.05)[0]) for d in (known, other)]
    assert width[1] > 1.1 * width[0]


@settings(max_examples=40)
@given(st.lists(st.tuples(st.text(max_size=80), st.text(max_size=80), st.integers(0, 10**7)), min_size=1, max_size=5))
def test_any_prompt_at_any_time_gives_a_distribution_above_what_has_come(learnt, rows) -> None:
    text, so_far_text, so_far = (list(column) for column in zip(*rows, strict=True))
    prompts = Prompts(len(rows), text=text, output_so_far=so_far_text)
    message = learnt.predict(prompts, np.array(so_far))
    assert (message.tokens[:, 0] > np.array(so_far)).all()
    assert np.isfinite(message.mean).all()


def test_a_request_is_predicted_the_same_alone_and_in_a_batch(learnt) -> None:
    prompts = samples().prompts.take(np.arange(20))
    together = learnt.predict(prompts, np.arange(20) * 10)
    for i in range(20):
        alone = learnt.predict(prompts.take(np.array([i])), np.array([i * 10]))
        np.testing.assert_allclose(alone.tokens[0], together.tokens[i], rtol=1e-9)


def test_the_text_so_far_reveals_when_the_end_is_near(learnt) -> None:
    fresh = samples(seed=3)
    rows = np.flatnonzero(fresh.output_tokens > 120)
    part = fresh.take(rows)
    near = text_so_far(part.output[0], int(part.output_tokens[0]), int(part.output_tokens[0]))
    ask = replace(part.prompts.take(np.array([0])), output_so_far=[near])
    started = replace(ask, output_so_far=["word and more. " * 30])
    so_far = np.array([100])
    assert learnt.predict(ask, so_far).mean[0] <= learnt.predict(started, so_far).mean[0]


def test_censored_outputs_count_as_longer_than_seen() -> None:
    complete, cut = samples(("m",), spread=0.2), samples(("m",), spread=0.2, cap=300)
    blind = replace(cut, censored=np.zeros(len(cut), bool))
    essay = Prompts(1, text=["Write an essay about old Rome?"], model=["m"])
    message = {
        name: float(Lexical(max_windows=1).fit(s).predict(essay).median[0])
        for name, s in (("complete", complete), ("cut", cut), ("blind", blind))
    }
    assert message["blind"] < 305
    assert message["blind"] < message["cut"]


@pytest.mark.parametrize("n", [1, 2, 3, 30])
@pytest.mark.parametrize("tokens", [1, 77])
def test_few_samples_of_one_constant_length_predict_that_length(n, tokens) -> None:
    prompts = Prompts(n, text=[f"prompt {i}" for i in range(n)])
    made = Lexical().fit(Samples(prompts, np.full(n, tokens), np.zeros(n, bool)))
    message = made.predict(Prompts(2, text=["", "Да? 什么"]))
    assert np.abs(message.median - tokens).max() <= max(1, 0.05 * tokens)
    assert (made.predict(prompts, np.full(n, tokens + 5)).tokens > tokens + 5).all()


def test_duplicates_do_not_drown_the_others() -> None:
    once = [f"{ask} {place}?" for ask in REQUESTS for place in PLACES]
    tokens = np.array([n for n in REQUESTS.values() for _ in PLACES])
    text, many = once + [once[0]] * 2000, np.append(tokens, np.full(2000, 8))
    made = Lexical(max_windows=1).fit(Samples(Prompts(len(text), text=text), many, np.zeros(len(text), bool)))
    assert made.predict(Prompts(1, text=["Write an essay about far Oslo?"])).median[0] > 250


def test_unusable_training_samples_are_refused() -> None:
    with pytest.raises(InputError, match="have none"):
        Lexical().fit(Samples(Prompts(1), np.ones(1, np.int64), np.zeros(1, bool)))
    with pytest.raises(InputError, match="every output was cut"):
        Lexical().fit(samples(cap=1))
    with pytest.raises(InputError, match="fit"):
        Lexical().predict(Prompts(1, text=["a"]))
    with pytest.raises(InputError, match="at least 1"):
        Lexical(window_tokens=0)


@pytest.mark.slow
def test_the_same_samples_give_the_same_bytes_and_a_file_the_same_answers(tmp_path, learnt) -> None:
    for name in ("a", "b"):
        save(Lexical(max_windows=300).fit(samples()), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    save(learnt, tmp_path / "c")
    again, fresh = load(tmp_path / "c"), samples(seed=4)
    for so_far in (0, 50):
        np.testing.assert_allclose(
            again.predict(fresh.prompts, so_far).tokens, learnt.predict(fresh.prompts, so_far).tokens, rtol=1e-4
        )
    assert again.knows(fresh.prompts.text).all()
    assert not again.knows(["something else"]).any()


def test_a_damaged_state_is_refused(learnt) -> None:
    meta, arrays = learnt.state()
    for broken in (
        {**arrays, "z": arrays["z"][:1]},
        {**arrays, "location.feature": arrays["location.feature"] + 10_000},
        {name: values for name, values in arrays.items() if name != "scale.value"},
        {**arrays, "weights": arrays["weights"][:-1]},
    ):
        with pytest.raises(LengthwiseError):
            Lexical.from_state(meta, broken)
    with pytest.raises(InputError, match="other features"):
        Lexical.from_state({**meta, "layout": [0, 1, 2]}, arrays)


def test_predicting_imports_no_scikit_learn(tmp_path, learnt) -> None:
    save(learnt, tmp_path / "m.lwp")
    code = (
        "import sys; from lengthwise.predict import Prompts, load;"
        f"print(load({str(tmp_path / 'm.lwp')!r}).predict(Prompts(1, text=['hi'])).median);"
        "sys.exit(bool({'sklearn', 'numba', 'polars', 'scipy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def test_trees_agree_with_scikit_learn() -> None:
    from sklearn.ensemble import HistGradientBoostingRegressor

    rng = np.random.default_rng(0)
    x = np.round(rng.normal(size=(400, 6)), 2)
    y = x[:, 0] * np.sign(x[:, 1]) + 0.1 * rng.normal(size=400)
    own = fit_trees(x, y, np.ones(400), trees=30, depth=3, seed=1)
    reference = HistGradientBoostingRegressor(
        learning_rate=0.05, max_iter=30, max_depth=3, max_leaf_nodes=None, min_samples_leaf=20, l2_regularization=5.0,
        max_features=0.2, early_stopping=False, random_state=1,
    ).fit(x, y)  # fmt: skip
    np.testing.assert_allclose(own.predict(x), reference.predict(x), rtol=1e-9)
    again = Trees.from_arrays(own.to_arrays("t"), "t", 6)
    np.testing.assert_array_equal(again.predict(x), own.predict(x))


@given(st.integers(1, 200), st.integers(0, 100))
def test_quantiles_of_residuals_do_not_decrease_and_lie_among_them(n, seed) -> None:
    rng = np.random.default_rng(seed)
    values, cut = rng.normal(size=n), rng.random(n) < 0.3
    found = residual_quantiles(values, cut, rng.random(n) + 0.1, LEVELS)
    assert (np.diff(found) >= 0).all()
    assert np.isfinite(found).all()


def test_imputed_lengths_are_above_the_cut_and_templates_count_as_few() -> None:
    y, cut = np.array([1.0, 2.0, 3.0, 2.5]), np.array([False, False, False, True])
    filled = imputed(y, cut, np.zeros(4))
    assert filled[3] == pytest.approx(3.0)
    assert filled[:3].tolist() == [1.0, 2.0, 3.0]
    words = [["solve", "this", "now", "please", str(i)] for i in range(100)] + [["write", "a", "poem"]]
    shares = template_weights(words)
    assert shares[:100].sum() == pytest.approx(10)
    assert shares[100] == 1
