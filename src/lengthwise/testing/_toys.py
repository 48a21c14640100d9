"""Samples from which anyone can learn something."""

from __future__ import annotations

import numpy as np

from lengthwise.predict import Prompts, Samples

_OPENINGS = ("Yes or no:", "In one sentence,", "List", "Explain step by step", "Write a long story about")
_THINGS = ("the moon", "a queue", "tea", "old maps", "rivers", "a lost key", "winter", "two ships")
_MIDDLE = (8.0, 30.0, 90.0, 240.0, 700.0)
_MODELS = {"terse": 0.6, "chatty": 1.6}


def toy_samples(n: int = 400, seed: int = 0) -> Samples:
    """Questions whose opening, prompt length and model tell much about the length of the answer.

    Outputs are log-normal about a middle of the opening, times a factor of the model; a few are cut.
    """
    rng = np.random.default_rng(seed)
    kind, thing = rng.integers(len(_OPENINGS), size=n), rng.integers(len(_THINGS), size=n)
    model = [list(_MODELS)[at] for at in rng.integers(len(_MODELS), size=n)]
    text = [
        f"{_OPENINGS[k]} {_THINGS[t]}, please ({row})"
        for row, (k, t) in enumerate(zip(kind, thing, strict=True))
    ]
    middle = np.array(_MIDDLE)[kind] * np.array([_MODELS[name] for name in model])
    output = np.maximum(1, np.rint(middle * np.exp(0.4 * rng.normal(size=n)))).astype(np.int64)
    cut = output > 1000
    told = ["word " * int(tokens) for tokens in np.minimum(output, 1000)]
    prompts = Prompts(n, text, 5 + 4 * kind + rng.integers(3, size=n), model)
    return Samples(prompts, np.minimum(output, 1000), cut, told, {"data": "toy"})
