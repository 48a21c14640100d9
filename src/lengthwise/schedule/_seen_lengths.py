"""The lengths of a task after an alarm, as far as the requests since tell them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lengthwise.schedule.drift import moments, placed
from lengthwise.schedule.lengths import TaskLengths
from lengthwise.schedule.watch import SIDES, Alarm
from lengthwise.schema.adaptation import LengthFacts

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

ENOUGH = 1000
"""Requests from which on lengths are counted: ten of them are then beyond the 99 % quantile."""


def lengths_since(task: TaskLengths, alarm: Alarm, longest_tokens: int) -> TaskLengths:
    """The lengths after an alarm.

    From ``ENOUGH`` requests on they are counted. Of fewer, the sides that moved, or of which there is more evidence
    for that than against it, keep the shape of the planned ones, at the mean and standard deviation that were seen;
    the others stay, and so does a side that was not watched.

    Args:
        task: As planned.
        alarm: With the requests since the change.
        longest_tokens: The longest prompt with its output that the model takes.
    """
    sides = zip(SIDES, (task.prompt_pmf, task.output_pmf), strict=True)
    seen = {"prompts": alarm.prompt_tokens, "outputs": alarm.output_tokens}
    moved = {side for side in SIDES if side in alarm.sides or alarm.evidence.get(side, 0.0) >= 1}
    prompt, output = (
        _side(pmf, seen[side], moved=side in moved) if side in alarm.watched else pmf for side, pmf in sides
    )
    most_output = max(longest_tokens // 2, longest_tokens - (len(prompt) - 1))
    output = _within(output, most_output)
    return TaskLengths(_within(prompt, longest_tokens - (len(output) - 1)), output, task.name)


def facts_of(task: TaskLengths, level: float, output_tokens: int | None = None) -> LengthFacts:
    """A task's lengths in numbers; the bound is for a quantile of the outputs, or for so many tokens."""
    prompt_mean, prompt_sd, _ = moments(task.prompt_pmf)
    return LengthFacts(
        prompt_mean,
        prompt_sd,
        *moments(task.output_pmf),
        quantile_tokens=task.output_quantile(level) if output_tokens is None else output_tokens,
    )


def _side(pmf: Floats, tokens: Ints, *, moved: bool) -> Floats:
    if len(tokens) >= ENOUGH:
        return np.asarray(np.bincount(tokens) / len(tokens))
    if not moved:
        return pmf
    mean, sd, _ = moments(pmf)
    times = float(tokens.std(ddof=1)) / sd if sd > 0 and len(tokens) > 1 else 1.0
    at = np.arange(len(pmf), dtype=np.float64)
    to = float(tokens.mean()) + (at - mean) * times
    return placed(to, pmf, int(np.ceil(max(to.max(), tokens.max(), 1.0))))


def _within(pmf: Floats, most_tokens: int) -> Floats:
    """Lengths cut at a limit, as an engine cuts them."""
    if len(pmf) - 1 <= most_tokens:
        return pmf
    cut = pmf[: most_tokens + 1].copy()
    cut[-1] += pmf[most_tokens + 1 :].sum()
    return cut


__all__ = ["ENOUGH", "facts_of", "lengths_since"]
