"""What ``lengthwise predict`` says of its input before any number."""

from __future__ import annotations

import difflib
from pathlib import Path

from lengthwise.predict import Samples
from lengthwise.predict.evaluate import Evaluation
from lengthwise.predict.shipped import NAME
from lengthwise.schema.errors import InputError

FEW = 100
"""Samples below which scores and intervals say little."""


def notes(samples: Samples) -> list[str]:
    """A line for each thing of the samples that may have been meant otherwise."""
    n, facts = len(samples), samples.facts
    ends = ", ".join(f"{reason} ({count:,})" for reason, count in facts.get("unknown_finish", {}).items())
    keys = ", ".join(f"{key} (did you mean {name}?)" for key, name in facts.get("misspelt", {}).items())
    told = {
        f"note: {facts.get('no_prompt', 0):,} of {n:,} rows have no prompt": facts.get("no_prompt"),
        f"note: keys that are not understood: {keys}": keys,
        f"note: reasons to end that are not known, taken for an end by itself: {ends}": ends,
        f"note: output tokens of {facts.get('estimated_tokens', 0):,} of {n:,} rows were estimated from the text":
            facts.get("estimated_tokens"),
        f"note: {facts.get('left_out', 0):,} rows failed or are empty, and are left out": facts.get("left_out"),
        f"warning: {n:,} samples are few to learn from; below {FEW} take the scores as a hint at best": n < FEW,
    }  # fmt: skip
    return [line for line, holds in told.items() if holds]


def seen_lines(found: Evaluation) -> list[str]:
    """One line where the predictor had learnt from prompts that it is judged by."""
    if not found.seen:
        return []
    return [f"warning: not a fair test: {found.seen:,} of these {found.prompts:,} prompts were learnt from"]


def mend_name(source: str) -> str:
    """The name of a predictor as it was given.

    Raises:
        InputError: There is no such file, and the name is near to that of the shipped one.
    """
    path = Path(source)
    if (
        not path.exists()
        and not path.suffix
        and source != NAME
        and difflib.get_close_matches(source.lower(), [NAME])
    ):
        raise InputError(f"there is no predictor file {source}; did you mean: {NAME}?")
    return source
