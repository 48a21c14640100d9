"""Predictors that do harm, each in its own way; they can be sent to a process."""

from __future__ import annotations

import contextlib
import os
import time

import numpy as np

from lengthwise.predict import LengthDistribution


def _length(text: str) -> float:
    return 10.0 * (1 + len(text.split()))


def _scribble() -> None:
    for fd in range(3, 20):
        with contextlib.suppress(OSError):
            os.write(fd, b"garbage of some length " * 10)


class Strange:
    """An answer that cannot even be looked at."""

    levels = np.array([0.0, 1.0])

    @property
    def tokens(self):
        raise ZeroDivisionError("do not look")


class Words:
    """Predicts ten tokens a word, slowly where configured."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def predict(self, prompts, tokens_so_far=0):
        if len(prompts) and "Rome" not in prompts.text[0]:  # not while it is measured
            time.sleep(self.seconds)
        return LengthDistribution.point([_length(text) for text in prompts.text]).given(tokens_so_far)


class OneWord(Words):
    """Like Words, but some words in a prompt make it misbehave."""

    def predict(self, prompts, tokens_so_far=0):
        text = " ".join(prompts.text)
        if "raise" in text:
            raise RuntimeError("it was asked to")
        if "hang" in text:
            time.sleep(1000)
        if "die" in text:
            os._exit(3)
        if "eat" in text:
            return np.ones(3 << 26)  # 1.5 GiB
        if "scribble" in text:
            _scribble()
        if "print" in text:
            print("what a predictor prints goes elsewhere")
        if "strange" in text:
            return Strange()
        if "shape" in text:
            return np.ones(len(prompts) + 1)
        plain = np.array([_length(one) for one in prompts.text])
        plain[["nan" in one for one in prompts.text]] = np.nan
        plain[["negative" in one for one in prompts.text]] = -4.0
        plain[["huge" in one for one in prompts.text]] = 1e300
        return plain
