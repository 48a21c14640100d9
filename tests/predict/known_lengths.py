"""Lengths whose law is known."""

from __future__ import annotations

import numpy as np

from lengthwise.predict import LEVELS, LengthDistribution, Prompts, Samples


def world(n=2000, seed=0, cap=None):
    """Outputs that grow with the prompt, twice as long of model b; cut at ``cap``."""
    rng = np.random.default_rng(seed)
    prompt_tokens, model = rng.integers(1, 2000, n), rng.choice(["a", "b"], n)
    mean = 3 + prompt_tokens / 1000 + (model == "b") * np.log(2)
    output = np.maximum(1, np.rint(np.exp(mean + 0.6 * rng.normal(size=n)))).astype(int)
    cut = np.zeros(n, bool) if cap is None else output > cap
    output = output if cap is None else np.minimum(output, cap)
    text = [f"prompt {row} of {tokens}" for row, tokens in enumerate(prompt_tokens)]
    return Samples(Prompts(n, text, prompt_tokens, list(model)), output, cut)


class Misled:
    """Knows what matters, and is biased and far too sure."""

    def fit(self, samples):
        return self

    def predict(self, prompts, tokens_so_far=0):
        middle = np.exp(3.4 + prompts.prompt_tokens / 1000)
        message = LengthDistribution.of(middle[:, None] * np.exp(0.1 * (2 * LEVELS - 1)))
        return message.given(tokens_so_far)


def covered(predictor, samples, age=0, low=0.05, high=0.95):
    """The share of lengths within an interval of quantiles, of those that reach the age."""
    alive = samples.take(np.flatnonzero(samples.output_tokens > age))
    message = predictor.predict(alive.prompts, age)
    y = alive.output_tokens
    return float(((y > message.quantile(low)) & (y <= message.quantile(high))).mean())
