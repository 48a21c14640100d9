"""A predictor that does harm; it can be sent to a process."""

from __future__ import annotations

import time

import numpy as np

from lengthwise.predict import LengthDistribution


class Bad:
    """A predictor that does harm in one of several ways."""

    def __init__(self, how: str) -> None:
        self.how = how

    def predict(self, prompts, tokens_so_far=0):
        if self.how == "raises":
            raise RuntimeError("it was asked to")
        if self.how == "slow" and len(prompts) < 8 and "tell" in prompts.text[0]:
            time.sleep(0.3)
        lengths = [float(text.split()[-1]) if text[-1:].isdigit() else 1.0 for text in prompts.text]
        reported = {"nan": np.nan, "zero": 0.0, "huge": 1e300}.get(self.how)
        if reported is not None:
            lengths = [reported] * len(lengths)
        elif self.how == "adversarial":
            lengths = [1000.0 / one for one in lengths]
        return LengthDistribution.point(lengths)
