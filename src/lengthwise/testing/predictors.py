"""Conformance kit for predictors: call ``check_predictor(MyPredictor)`` in a test."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from lengthwise.predict import LEVELS, Constant, LengthDistribution, Prompts, Samples
from lengthwise.predict.wrappers import pinball
from lengthwise.testing.checks import require, run_checks

_PREFIXES = ("Yes or no:", "In one sentence,", "List", "Explain step by step", "Write a long story about")
_THINGS = ("the moon", "a queue", "tea", "old maps", "rivers", "a lost key", "winter", "two ships")
_MEDIANS = (8.0, 30.0, 90.0, 240.0, 700.0)
_MODELS = {"terse": 0.6, "chatty": 1.6}


def toy_samples(n: int = 400, seed: int = 0) -> Samples:
    """Return questions whose median output length depends on their first words and the model. Few are censored."""
    rng = np.random.default_rng(seed)
    kind, thing = rng.integers(len(_PREFIXES), size=n), rng.integers(len(_THINGS), size=n)
    model = [list(_MODELS)[at] for at in rng.integers(len(_MODELS), size=n)]
    text = [f"{_PREFIXES[k]} {_THINGS[t]}, please ({row})" for row, (k, t) in enumerate(zip(kind, thing, strict=True))]
    median = np.array(_MEDIANS)[kind] * np.array([_MODELS[name] for name in model])
    tokens = np.maximum(1, np.rint(median * np.exp(0.4 * rng.normal(size=n)))).astype(np.int64)
    output = ["word " * int(count) for count in np.minimum(tokens, 1000)]
    prompts = Prompts(n, text, 5 + 4 * kind + rng.integers(3, size=n), model)
    return Samples(prompts, np.minimum(tokens, 1000), tokens > 1000, output, {"data": "toy"})


Make = Callable[[], Any]
Check = Callable[[Make, Samples], None]

_AGES = (0, 1, 50, 1000, 100_000)
_UNUSUAL = ("", " ", "\n\n", "\u6f22\u5b57", "\U0001f600\U0001f680", "e\u0301\u200f\u202e", "\x00\x07", "a" * 200_000)


def check_predictor(
    make_predictor: Make, samples: Samples | None = None, *, requires_training: bool = True, skip: Sequence[str] = ()
) -> list[str]:
    """Run the checks of ``PREDICTOR_CHECKS``, with or without a test runner. Return the names of the passed checks.

    ``make_predictor`` returns a new untrained predictor, which is trained with ``samples``, by default
    ``toy_samples()``. With ``requires_training`` the predictor must be better than a constant on the toy samples. An
    AssertionError states the requirement that the predictor violates, and the actual value.
    """
    advice = f"pass the class {type(make_predictor).__name__}, or a function, not an instance"
    require(callable(make_predictor), f"check_predictor takes a function that makes predictors: {advice}")
    samples = toy_samples() if samples is None else samples
    skipped = {*skip, *(() if requires_training else ("requires_training",))}
    return run_checks(PREDICTOR_CHECKS, skipped, lambda: (make_predictor, copy.deepcopy(samples)))


def answers_in_shape(make: Make, samples: Samples) -> None:
    """Check that ``fit`` returns the predictor, and ``predict`` a LengthDistribution with one row per request."""
    predictor = make()
    with _no_exception("fit"):
        result = predictor.fit(samples)
    require(result is predictor, f"fit must return the predictor itself; it returned {type(result).__name__}")
    rows = len(_predict(predictor, samples.prompts, 0))
    require(rows == len(samples), f"predict must return one row per request ({len(samples)}); it returned {rows}")


def quantiles_in_order(make: Make, samples: Samples) -> None:
    """Check that quantiles are finite, at least 1, and do not decrease with the level."""
    tokens = np.asarray(_predict(_fit(make, samples), samples.prompts, 0).tokens)
    require(bool(np.isfinite(tokens).all()), "predicted lengths must be finite; some are NaN or infinite")
    require(bool((tokens >= 1).all()), f"predicted lengths must be at least 1; the minimum is {tokens.min()}")
    require(bool((np.diff(tokens, axis=1) >= 0).all()), "quantiles must not decrease along the levels; some do")


def deterministic(make: Make, samples: Samples) -> None:
    """Check that equal samples give equal predictors, and that repeated predictions are equal."""
    one, two = _fit(make, samples), _fit(make, samples)
    first, repeated, other = (_quantiles(predictor, samples.prompts, 0) for predictor in (one, one, two))
    require(np.array_equal(first, repeated), "repeated predictions for one prompt must be equal; they differ")
    require(np.array_equal(first, other), "predictors fitted on the same samples must predict the same; they differ")


def rows_are_independent(make: Make, samples: Samples) -> None:
    """Check that a prediction does not depend on other requests in its batch, or on their order."""
    predictor = _fit(make, samples)
    prompts = samples.prompts.take(np.arange(min(16, len(samples))))
    rows = np.arange(len(prompts))
    for ages in (np.zeros(len(prompts), np.int64), rows * 37):
        batch = _quantiles(predictor, prompts, ages)
        reverse = _quantiles(predictor, prompts.take(rows[::-1]), ages[::-1])[::-1]
        require(_is_close(batch, reverse), "the order of a batch must not matter; reversed, predictions differ")
        for row in rows[::5]:
            single = _quantiles(predictor, prompts.take(rows[[row]]), ages[[row]])[0]
            medians = f"{single[12]:g} alone and {batch[row][12]:g} in a batch of {len(prompts)}"
            rule = "a request alone must be predicted as in a batch"
            require(_is_close(single, batch[row]), f"{rule}; the median of request {row} is {medians}")
        repeats = np.repeat(rows, 1 + rows % 3)
        repeated = _quantiles(predictor, prompts.take(repeats), ages[repeats])
        rule = "how often a request is in a batch must not matter"
        require(_is_close(repeated, batch[repeats]), f"{rule}; with some of them repeated, predictions differ")


def inputs_untouched(make: Make, samples: Samples) -> None:
    """Check that neither ``fit`` nor ``predict`` changes its arguments."""
    given, ages = copy.deepcopy(samples), np.full(len(samples), 3)
    predictor = _fit(make, given)
    require(_is_equal(given, samples), "fit must not change its samples; it did")
    _predict(predictor, given.prompts, ages)
    require(_is_equal(given, samples), "predict must not change the prompts; it did")
    require(bool((ages == 3).all()), "predict must not change tokens_so_far; it did")


def above_tokens_so_far(make: Make, samples: Samples) -> None:
    """Check that a predicted total length is above the tokens so far, however many these are."""
    predictor = _fit(make, samples)
    prompts = samples.prompts.take(np.arange(min(8, len(samples))))
    for age in _AGES:
        minimum = float(_predict(predictor, prompts, age).tokens.min())
        rule = "a length must be above the tokens so far"
        require(minimum > age, f"{rule}; after {age} tokens a total of {minimum:g} is predicted")
    mixed = np.array(_AGES)[np.arange(len(prompts)) % len(_AGES)]
    tokens = _predict(predictor, prompts, mixed).tokens[:, 0]
    require(bool((tokens > mixed).all()), "each request has its own tokens so far; in a mixed batch one is ignored")


def conditions_on_survival(make: Make, samples: Samples) -> None:
    """Check that with tokens so far but no text, ``predict`` returns ``predict(prompts).given(tokens)``."""
    predictor = _fit(make, samples)
    prompts = samples.prompts.take(np.arange(min(8, len(samples))))
    first = _predict(predictor, prompts, 0)
    for age in (1, 50, 300):
        found, expected = _predict(predictor, prompts, age).median, first.given(age).median
        row = int(np.argmax(np.abs(found - expected)))
        rule = f"after {age} tokens without a text, predict must return predict(prompts).given({age})"
        medians = f"the median of request {row} is {found[row]:g}, and {expected[row]:g} by survival"
        require(bool(np.allclose(found, expected, rtol=0.01, atol=1)), f"{rule}; {medians}")


def unusual_prompts(make: Make, samples: Samples) -> None:
    """Check empty prompts, unusual characters, unknown models, missing columns and empty batches."""
    predictor = _fit(make, samples)
    n = len(_UNUSUAL)
    for subject, prompts in {
        "empty and unusual texts": Prompts(n, _UNUSUAL, np.full(n, 9), ["terse"] * n),
        "an unknown model": Prompts(n, _UNUSUAL, np.full(n, 9), ["", "example/unknown"] * (n // 2)),
        "an enormous prompt": Prompts(1, ["x"], np.array([10**9]), ["terse"]),
        "no columns at all": Prompts(3),
        "an empty batch": Prompts(0),
    }.items():
        prediction = _predict(predictor, prompts, 0, f" on {subject}")
        is_valid = len(prediction) == len(prompts) and bool(np.isfinite(prediction.tokens).all())
        require(is_valid, f"predictions for {subject} must be finite, one row per request; they are not")


def constant_length(make: Make, samples: Samples) -> None:
    """Check that a predictor learns a constant output length."""
    same = Samples(samples.prompts, np.full(len(samples), 64), np.zeros(len(samples), bool), samples.output)
    mean = float(np.median(_predict(_fit(make, same, " on one constant length"), same.prompts, 0).mean))
    require(48 <= mean <= 96, f"outputs that all have 64 tokens must be predicted as about 64; got {mean:g}")


def censored_outputs(make: Make, samples: Samples) -> None:
    """Check that the mean prediction is above the mean observed length if many outputs are censored."""
    limit = max(2, int(np.median(samples.output_tokens)))
    y = np.minimum(samples.output_tokens, limit)
    cut = Samples(samples.prompts, y, samples.censored | (samples.output_tokens > limit), samples.output)
    mean = float(_predict(_fit(make, cut, " on half-censored outputs"), cut.prompts, 0).mean.mean())
    rule = f"censored outputs are longer than observed, so that more than {y.mean():.3g} tokens must be predicted"
    require(mean > 1.05 * y.mean() or not cut.censored.any(), f"{rule}; got {mean:.3g}")


def state_round_trip(make: Make, samples: Samples) -> None:
    """Check that a predictor with ``state`` and ``from_state`` predicts the same after a round trip through JSON."""
    predictor = _fit(make, samples)
    if not hasattr(predictor, "state") or not hasattr(predictor, "from_state"):
        return
    metadata, arrays = predictor.state()
    try:
        metadata = json.loads(json.dumps(metadata))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"state must return a JSON-serializable dict; it does not: {error}") from error
    invalid = [name for name, array in arrays.items() if np.asarray(array).dtype.kind not in "biuf"]
    require(not invalid, f"arrays of a state must be plain numbers; {', '.join(invalid)} are not")
    with _no_exception("from_state"):
        loaded = type(predictor).from_state(metadata, {name: np.array(array) for name, array in arrays.items()})
    for age in (0, 60):
        one, other = (_predict(p, samples.prompts, age).tokens for p in (predictor, loaded))
        require(np.array_equal(one, other), "a predictor restored from its state must predict the same; it does not")


def requires_training(make: Make, samples: Samples) -> None:
    """Check that the pinball loss on toy samples, where prompts predict lengths, is below 0.9 of a constant's."""
    del samples
    train, test = toy_samples(800, seed=1), toy_samples(400, seed=2)
    loss, constant = (pinball(_quantiles(_fit(m, train), test.prompts, 0), test) for m in (make, Constant))
    rule = f"pinball loss on new questions must be well below a constant's {constant:.3g}"
    require(loss < 0.9 * constant, f"{rule}; it is {loss:.3g}")


PREDICTOR_CHECKS: dict[str, Check] = {check.__name__: check for check in (
    answers_in_shape, quantiles_in_order, deterministic, rows_are_independent, inputs_untouched, above_tokens_so_far,
    conditions_on_survival, unusual_prompts, constant_length, censored_outputs, state_round_trip, requires_training,
)}  # fmt: skip
"""Checks by name; each takes a function that makes predictors, and samples, and raises AssertionError."""


def _fit(make: Make, samples: Samples, where: str = "") -> Any:
    predictor = make()
    with _no_exception(f"fit{where}"):
        predictor.fit(samples)
    return predictor


def _predict(predictor: Any, prompts: Prompts, tokens_so_far: Any, where: str = "") -> LengthDistribution:
    with _no_exception(f"predict{where}"):
        prediction = predictor.predict(prompts, tokens_so_far)
    message = f"predict must return a LengthDistribution; it returned {type(prediction).__name__}"
    require(isinstance(prediction, LengthDistribution), message)
    return prediction  # type: ignore[no-any-return]


def _quantiles(predictor: Any, prompts: Prompts, tokens_so_far: Any) -> Any:
    return _predict(predictor, prompts, tokens_so_far).at(LEVELS).tokens


@contextmanager
def _no_exception(call: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{call} must not raise; it raised {type(error).__name__}: {error}") from error


def _is_close(one: Any, other: Any) -> bool:
    return bool(np.allclose(one, other, rtol=1e-5, atol=1e-3))


def _is_equal(one: Samples, other: Samples) -> bool:
    columns = ("text", "prompt_tokens", "model", "output_so_far")
    pairs = [(getattr(one.prompts, c), getattr(other.prompts, c)) for c in columns]
    pairs += [(getattr(one, c), getattr(other, c)) for c in ("output_tokens", "censored", "output")]
    return all((a is None) == (b is None) and (a is None or list(a) == list(b)) for a, b in pairs)
