"""The conformance kit of predictors: ``check_predictor(MyPredictor)`` in a test of one's own."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from lengthwise.predict import LEVELS, Constant, LengthDistribution, Prompts, Samples
from lengthwise.predict.wrappers import pinball

_PREFIXES = ("Yes or no:", "In one sentence,", "List", "Explain step by step", "Write a long story about")
_THINGS = ("the moon", "a queue", "tea", "old maps", "rivers", "a lost key", "winter", "two ships")
_MIDDLE = (8.0, 30.0, 90.0, 240.0, 700.0)
_MODELS = {"terse": 0.6, "chatty": 1.6}


def toy_samples(n: int = 400, seed: int = 0) -> Samples:
    """Questions whose opening, prompt length and model tell much about the length of the answer.

    Outputs are log-normal about a middle of the opening, times a factor of the model; a few are cut.
    """
    rng = np.random.default_rng(seed)
    kind, thing = rng.integers(len(_PREFIXES), size=n), rng.integers(len(_THINGS), size=n)
    model = [list(_MODELS)[at] for at in rng.integers(len(_MODELS), size=n)]
    text = [f"{_PREFIXES[k]} {_THINGS[t]}, please ({row})" for row, (k, t) in enumerate(zip(kind, thing, strict=True))]
    middle = np.array(_MIDDLE)[kind] * np.array([_MODELS[name] for name in model])
    output = np.maximum(1, np.rint(middle * np.exp(0.4 * rng.normal(size=n)))).astype(np.int64)
    cut = output > 1000
    told = ["word " * int(tokens) for tokens in np.minimum(output, 1000)]
    prompts = Prompts(n, text, 5 + 4 * kind + rng.integers(3, size=n), model)
    return Samples(prompts, np.minimum(output, 1000), cut, told, {"data": "toy"})


Make = Callable[[], Any]
Check = Callable[[Make, Samples], None]

_AGES = (0, 1, 50, 1000, 100_000)
_ODD = ("", " ", "\n\n", "\u6f22\u5b57", "\U0001f600\U0001f680", "e\u0301\u200f\u202e", "\x00\x07", "a" * 200_000)


def check_predictor(
    make_predictor: Make, samples: Samples | None = None, *, requires_training: bool = True, skip: Sequence[str] = ()
) -> list[str]:
    """The names of the checks that a predictor passed: all that there are.

    Works in any test runner, or without one.

    Args:
        make_predictor: Called without arguments, gives a new predictor that has not learnt.
        samples: What it learns from in the checks; None: a toy of 400 questions in which the wording, the
            prompt's length and the model tell the length.
        requires_training: Whether it must do better than a constant on the toy.
        skip: Names of checks to leave out (see ``PREDICTOR_CHECKS``).

    Raises:
        AssertionError: A check failed; one sentence says what must hold and what came.
    """
    _require(
        callable(make_predictor),
        f"check_predictor takes what makes predictors, as it makes several: pass the class "
        f"{type(make_predictor).__name__}, or a function, not an instance",
    )
    known = toy_samples() if samples is None else samples
    left_out = {*skip, *(() if requires_training else ("requires_training",))}
    passed = [name for name in PREDICTOR_CHECKS if name not in left_out]
    for name in passed:
        PREDICTOR_CHECKS[name](make_predictor, copy.deepcopy(known))
    return passed


def answers_in_shape(make: Make, samples: Samples) -> None:
    """``fit`` returns the predictor, ``predict`` a LengthDistribution with a row a request."""
    predictor = make()
    with _no_exception("fit"):
        got = predictor.fit(samples)
    _require(got is predictor, f"fit must return the predictor itself; it returned {type(got).__name__}")
    said = _message(predictor, samples.prompts, 0)
    _require(len(said) == len(samples), f"predict must give a row a request ({len(samples)}); it gave {len(said)}")


def quantiles_in_order(make: Make, samples: Samples) -> None:
    """Quantiles are finite, at least 1 and do not decrease along the levels."""
    said = _message(_fit_result(make, samples), samples.prompts, 0)
    tokens = np.asarray(said.tokens)
    _require(bool(np.isfinite(tokens).all()), "predicted lengths must be finite; some are NaN or infinite")
    _require(bool((tokens >= 1).all()), f"predicted lengths must be at least 1; the least is {tokens.min()}")
    _require(bool((np.diff(tokens, axis=1) >= 0).all()), "quantiles must not decrease along the levels; some do")


def deterministic(make: Make, samples: Samples) -> None:
    """Equal samples make equal predictors, and asking twice gives one answer."""
    one, two = _fit_result(make, samples), _fit_result(make, samples)
    first = _message(one, samples.prompts, 0).at(LEVELS).tokens
    again, other = (_message(p, samples.prompts, 0).at(LEVELS).tokens for p in (one, two))
    _require(np.array_equal(first, again), "the same question must have the same answer; asked twice, they differ")
    _require(np.array_equal(first, other), "fitted twice on the same samples it must predict the same; it does not")


def rows_alone(make: Make, samples: Samples) -> None:
    """What is said of a request does not depend on the others of its batch: their order, or how often they come."""
    predictor = _fit_result(make, samples)
    few = samples.prompts.take(np.arange(min(16, len(samples))))
    for ages in (np.zeros(len(few), np.int64), np.arange(len(few)) * 37):
        whole = _message(predictor, few, ages).at(LEVELS).tokens
        turned = np.arange(len(few))[::-1]
        back = _message(predictor, few.take(turned), ages[turned]).at(LEVELS).tokens[turned]
        _require(_close(whole, back), "the order of a batch must not matter; turned round, it predicts otherwise")
        for row in range(0, len(few), 5):
            only = np.array([row])
            alone = _message(predictor, few.take(only), ages[only]).at(LEVELS).tokens[0]
            _require(
                _close(alone, whole[row]),
                f"a request alone must be predicted as in a batch; the median of request {row} is "
                f"{alone[12]:g} alone and {whole[row][12]:g} in a batch of {len(few)}",
            )
        often = np.repeat(np.arange(len(few)), 1 + np.arange(len(few)) % 3)
        _require(
            _close(_message(predictor, few.take(often), ages[often]).at(LEVELS).tokens, whole[often]),
            "how often a request is in a batch must not matter; with some of them repeated, it predicts otherwise",
        )


def inputs_untouched(make: Make, samples: Samples) -> None:
    """Neither ``fit`` nor ``predict`` changes what it was given."""
    given = copy.deepcopy(samples)
    ages = np.full(len(samples), 3)
    predictor = make()
    with _no_exception("fit"):
        predictor.fit(given)
    _require(_same(given, samples), "fit must not change its samples; it did")
    _message(predictor, given.prompts, ages)
    _require(_same(given, samples), "predict must not change the prompts; it did")
    _require(bool((ages == 3).all()), "predict must not change tokens_so_far; it did")


def above_what_came(make: Make, samples: Samples) -> None:
    """A whole length is above the tokens that have come, whatever their number."""
    predictor = _fit_result(make, samples)
    few = samples.prompts.take(np.arange(min(8, len(samples))))
    for age in _AGES:
        least = float(_message(predictor, few, age).tokens.min())
        _require(
            least > age, f"a length must be above the tokens so far; after {age} tokens it predicts {least:g} in all"
        )
    mixed = np.array(_AGES)[np.arange(len(few)) % len(_AGES)]
    said = _message(predictor, few, mixed).tokens[:, 0]
    _require(bool((said > mixed).all()), "each request has its own tokens so far; in a mixed batch one is ignored")


def odd_prompts(make: Make, samples: Samples) -> None:
    """Empty prompts, strange letters, unknown models, missing columns and empty batches have answers."""
    predictor = _fit_result(make, samples)
    n = len(_ODD)
    for what, prompts in {
        "empty and strange texts": Prompts(n, _ODD, np.full(n, 9), ["terse"] * n),
        "an unknown model": Prompts(n, _ODD, np.full(n, 9), ["", "nobody/has-this"] * (n // 2)),
        "an enormous prompt": Prompts(1, ["x"], np.array([10**9]), ["terse"]),
        "no columns at all": Prompts(3),
        "an empty batch": Prompts(0),
    }.items():
        said = _message(predictor, prompts, 0, f" on {what}")
        good = len(said) == len(prompts) and bool(np.isfinite(said.tokens).all())
        _require(good, f"{what} must be answered with finite lengths, a row a request; they are not")


def one_length(make: Make, samples: Samples) -> None:
    """Where every output has the same length, that is what is predicted."""
    same = Samples(samples.prompts, np.full(len(samples), 64), np.zeros(len(samples), bool), samples.output)
    said = float(np.median(_message(_fit_result(make, same, " on one constant length"), same.prompts, 0).mean))
    _require(48 <= said <= 96, f"outputs that are all of 64 tokens must be predicted as about 64; it says {said:g}")


def cut_outputs(make: Make, samples: Samples) -> None:
    """Where outputs were cut, lengths are not said to be what came."""
    at = max(2, int(np.median(samples.output_tokens)))
    y = np.minimum(samples.output_tokens, at)
    cut = Samples(samples.prompts, y, samples.censored | (samples.output_tokens > at), samples.output)
    said = float(_message(_fit_result(make, cut, " on outputs of which half were cut"), cut.prompts, 0).mean.mean())
    _require(
        said > 1.05 * y.mean() or not cut.censored.any(),
        f"cut outputs are longer than what came: where half were cut and {y.mean():.3g} tokens came on average, "
        f"more must be predicted; it predicts {said:.3g}",
    )


def state_comes_back(make: Make, samples: Samples) -> None:
    """One with ``state`` and ``from_state`` predicts the same after a round trip through JSON and arrays."""
    predictor = _fit_result(make, samples)
    if not hasattr(predictor, "state") or not hasattr(predictor, "from_state"):
        return
    meta, arrays = predictor.state()
    try:
        told = json.loads(json.dumps(meta))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"state must give a dict that JSON can hold; it does not: {error}") from error
    held = [name for name, array in arrays.items() if np.asarray(array).dtype.kind not in "biuf"]
    _require(not held, f"arrays of a state must be plain numbers; {', '.join(held)} are not")
    with _no_exception("from_state"):
        loaded = type(predictor).from_state(told, {name: np.array(array) for name, array in arrays.items()})
    for age in (0, 60):
        same = np.array_equal(
            _message(predictor, samples.prompts, age).tokens, _message(loaded, samples.prompts, age).tokens
        )
        _require(same, "a predictor made from its state must predict the same; it does not")


def requires_training(make: Make, samples: Samples) -> None:
    """On a toy that tells the length in three ways it has less pinball loss than a constant."""
    del samples
    known, fresh = toy_samples(800, seed=1), toy_samples(400, seed=2)
    own, dull = (
        pinball(_message(_fit_result(which, known), fresh.prompts, 0).at(LEVELS).tokens, fresh)
        for which in (make, Constant)
    )
    _require(
        own < 0.9 * dull, f"pinball loss on new questions must be well below a constant's {dull:.3g}; it is {own:.3g}"
    )


PREDICTOR_CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        answers_in_shape,
        quantiles_in_order,
        deterministic,
        rows_alone,
        inputs_untouched,
        above_what_came,
        odd_prompts,
        one_length,
        cut_outputs,
        state_comes_back,
        requires_training,
    )
}
"""Every check by its name; a check takes a maker of predictors and samples, and raises AssertionError."""


def _require(is_satisfied: bool, description: str) -> None:
    if not is_satisfied:
        raise AssertionError(description)


def _fit_result(make: Make, samples: Samples, where: str = "") -> Any:
    predictor = make()
    with _no_exception(f"fit{where}"):
        predictor.fit(samples)
    return predictor


def _message(predictor: Any, prompts: Prompts, tokens_so_far: Any, where: str = "") -> LengthDistribution:
    with _no_exception(f"predict{where}"):
        said = predictor.predict(prompts, tokens_so_far)
    if not isinstance(said, LengthDistribution):
        raise AssertionError(f"predict must return a LengthDistribution; it returned {type(said).__name__}")  # noqa: TRY004
    return said


@contextmanager
def _no_exception(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{what} must not raise; it raised {type(error).__name__}: {error}") from error


def _close(one: Any, other: Any) -> bool:
    return bool(np.allclose(one, other, rtol=1e-5, atol=1e-3))


def _same(one: Samples, other: Samples) -> bool:
    columns = ("text", "prompt_tokens", "model", "output_so_far")
    pairs = [(getattr(one.prompts, c), getattr(other.prompts, c)) for c in columns]
    pairs += [(getattr(one, c), getattr(other, c)) for c in ("output_tokens", "censored", "output")]
    return all((a is None) == (b is None) and (a is None or list(a) == list(b)) for a, b in pairs)
