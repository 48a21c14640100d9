"""The kit passes what is right, and each of its checks finds what it is for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lengthwise.predict import (
    LEVELS,
    BucketEcdf,
    Conditional,
    Conformal,
    Constant,
    Ecdf,
    Ensemble,
    Guarded,
    LengthDistribution,
)
from lengthwise.testing import PREDICTOR_CHECKS, check_predictor, toy_samples

GOOD = {
    "constant": Constant,
    "ecdf": Ecdf,
    "buckets": BucketEcdf,
    "chars": lambda: BucketEcdf(by=("model", "prompt_chars")),
    "conditional": lambda: Conditional(Ecdf()),
    "conformal": lambda: Conformal(BucketEcdf()),
    "ensemble": lambda: Ensemble([Constant(), BucketEcdf()]),
    "guarded": lambda: Guarded(BucketEcdf()),
    "nested": lambda: Guarded(Conformal(Ensemble([Ecdf(), Conditional(BucketEcdf())]))),
}


@pytest.mark.parametrize("name", GOOD)
def test_own_members_pass(name):
    requires_training = name != "constant"
    passed = check_predictor(GOOD[name], requires_training=requires_training)
    assert passed == [check for check in PREDICTOR_CHECKS if requires_training or check != "requires_training"]


def unchecked(tokens):
    """A LengthDistribution without validation."""
    stated = object.__new__(LengthDistribution)
    object.__setattr__(stated, "tokens", np.asarray(tokens, float))
    object.__setattr__(stated, "levels", LEVELS)
    return stated


class ReturnsNothing(BucketEcdf):
    def fit(self, samples):
        super().fit(samples)


class PlainNumbers(BucketEcdf):
    def predict(self, prompts, tokens_so_far=0):
        return super().predict(prompts, tokens_so_far).mean


class Falling(BucketEcdf):
    def predict(self, prompts, tokens_so_far=0):
        return unchecked(super().predict(prompts, tokens_so_far).tokens[:, ::-1])


class Moody(BucketEcdf):
    def predict(self, prompts, tokens_so_far=0):
        self.completion_request = getattr(self, "completion_request", 0) + 1
        stated = super().predict(prompts, tokens_so_far)
        return LengthDistribution(stated.tokens * (1 + self.completion_request / 100), stated.levels)


class Fickle(BucketEcdf):
    made = 0

    def fit(self, samples):
        Fickle.made += 1
        super().fit(samples)
        self.table_ = self.table_ + Fickle.made
        return self


class Sociable(BucketEcdf):
    """Moves every row towards the mean of its batch."""

    def predict(self, prompts, tokens_so_far=0):
        stated = super().predict(prompts, tokens_so_far)
        return LengthDistribution(
            stated.tokens + stated.mean.mean() / 10 if len(stated) else stated.tokens, stated.levels
        )


class InOrder(BucketEcdf):
    """Goes by the place in the batch."""

    def predict(self, prompts, tokens_so_far=0):
        stated = super().predict(prompts, tokens_so_far)
        return LengthDistribution(stated.tokens + np.arange(len(stated))[:, None], stated.levels)


class Counting(BucketEcdf):
    """Takes for longer what comes more than once."""

    def predict(self, prompts, tokens_so_far=0):
        stated = super().predict(prompts, tokens_so_far)
        often = np.array([list(prompts.text).count(t) for t in prompts.text] if prompts.text else [1] * len(stated))
        return LengthDistribution(stated.tokens * often.reshape(-1, 1), stated.levels)


class Careless(BucketEcdf):
    def fit(self, samples):
        super().fit(samples)
        samples.output_tokens[:] = 1
        return self


class Greedy(BucketEcdf):
    def predict(self, prompts, tokens_so_far=0):
        stated = super().predict(prompts, tokens_so_far)
        if prompts.prompt_tokens is not None:
            prompts.prompt_tokens[:] = 0
        return stated


class Deaf(BucketEcdf):
    """Ignores the tokens so far."""

    def predict(self, prompts, tokens_so_far=0):
        return super().predict(prompts, 0)


class OneAge(BucketEcdf):
    """Takes the first request's tokens so far for every request's, and no request's below 2."""

    def predict(self, prompts, tokens_so_far=0):
        ages = np.broadcast_to(np.asarray(tokens_so_far), (len(prompts),))
        return super().predict(prompts, int(ages[0]) if len(ages) else 0)


class Western(BucketEcdf):
    def predict(self, prompts, tokens_so_far=0):
        for text in prompts.text:
            text.encode("ascii")
        return super().predict(prompts, tokens_so_far)


class Closed(BucketEcdf):
    """Has answers for the models of its youth."""

    def predict(self, prompts, tokens_so_far=0):
        for name in prompts.model or []:
            self.models_.index(name)
        return super().predict(prompts, tokens_so_far)


class Spread(BucketEcdf):
    """Divides by the standard deviation of what it learns from."""

    def fit(self, samples):
        if samples.output_tokens.std() == 0:
            raise ZeroDivisionError("no spread")
        return super().fit(samples)


class Stubborn(BucketEcdf):
    """Says 500 where it sees but one length."""

    def fit(self, samples):
        super().fit(samples)
        if samples.output_tokens.std() == 0 and not samples.censored.any():
            self.table_ = np.full_like(self.table_, 500)
        return self


class CutsShort(BucketEcdf):
    """Takes what was cut for ended."""

    def fit(self, samples):
        return super().fit(replace(samples, censored=np.zeros(len(samples), bool)))


class AllOrNothing(BucketEcdf):
    def fit(self, samples):
        if samples.censored.mean() > 0.4:
            raise ValueError("too many were cut")
        return super().fit(samples)


class Forgetful(BucketEcdf):
    def state(self):
        meta, arrays = super().state()
        return meta, arrays | {"table": np.round(arrays["table"] / 7)}


class Unspeakable(BucketEcdf):
    def state(self):
        meta, arrays = super().state()
        return meta | {"self": self}, arrays


class Dull(Constant):
    pass


class Jumps(BucketEcdf):
    def predict(self, prompts, tokens_so_far=0):
        stated = super().predict(prompts, tokens_so_far)
        return LengthDistribution(stated.tokens * (1 + np.any(np.asarray(tokens_so_far) > 0)), stated.levels)


BROKEN = [
    (ReturnsNothing, "answers_in_shape", "fit must return the predictor itself; it returned NoneType"),
    (PlainNumbers, "answers_in_shape", "must return a LengthDistribution; it returned ndarray"),
    (Falling, "quantiles_in_order", "must not decrease"),
    (Moody, "deterministic", "repeated predictions for one prompt"),
    (Fickle, "deterministic", "fitted on the same samples"),
    (Sociable, "rows_are_independent", "a request alone must be predicted as in a batch"),
    (InOrder, "rows_are_independent", "order of a batch"),
    (Counting, "rows_are_independent", "how often a request is in a batch"),
    (Careless, "inputs_untouched", "fit must not change its samples"),
    (Greedy, "inputs_untouched", "predict must not change the prompts"),
    (Deaf, "above_tokens_so_far", "a length must be above the tokens so far"),
    (OneAge, "above_tokens_so_far", "mixed batch"),
    (Jumps, "conditions_on_survival", "without a text"),
    (Western, "unusual_prompts", "predict on empty and unusual texts must not raise; it raised UnicodeEncodeError"),
    (Closed, "unusual_prompts", "predict on an unknown model must not raise"),
    (Spread, "constant_length", "fit on one constant length must not raise; it raised ZeroDivisionError"),
    (Stubborn, "constant_length", "must be predicted as about 64; got 500"),
    (CutsShort, "censored_outputs", "censored outputs are longer than observed"),
    (AllOrNothing, "censored_outputs", "fit on half-censored outputs must not raise"),
    (Forgetful, "state_round_trip", r"must not raise|must predict the same"),
    (Unspeakable, "state_round_trip", "JSON"),
    (Dull, "requires_training", "well below a constant's"),
]


@pytest.mark.parametrize(("broken", "check", "message"), BROKEN, ids=[b[0].__name__ for b in BROKEN])
def test_what_is_broken_is_found_by_the_check_for_it(broken, check, message):
    with pytest.raises(AssertionError, match=message):
        PREDICTOR_CHECKS[check](broken, toy_samples())
    with pytest.raises(AssertionError):
        check_predictor(broken)


def test_every_check_has_found_something():
    assert {check for _, check, _ in BROKEN} == set(PREDICTOR_CHECKS)


def test_checks_can_be_left_out():
    assert "deterministic" not in check_predictor(
        Moody, skip=("deterministic", "rows_are_independent", "state_round_trip", "conditions_on_survival")
    )


def test_own_samples_may_be_given():
    few = toy_samples(60, seed=9).take(np.arange(40))
    assert check_predictor(Ecdf, few)


def test_the_package_does_not_need_the_kit():
    import subprocess
    import sys

    code = (
        "import lengthwise.cli, lengthwise.config, lengthwise.usecases, sys; print('lengthwise.testing' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_an_instance_is_refused_in_favour_of_its_class():
    with pytest.raises(AssertionError, match="pass the class BucketEcdf"):
        check_predictor(BucketEcdf())
