"""How much samples count that are alike, and the templates that make prompts alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SHRINK = 5.0
"""Samples that a group must have to be trusted by half."""
_REPEATS = 4.0
_TEMPLATE_WORDS, _LEAST_TEMPLATE = 4, 40


def root_shares(groups: Ints) -> Floats:
    """[n] weights that let a group of n samples count as the root of n."""
    return np.asarray(1 / np.sqrt(np.bincount(groups)[groups]))


def repeat_shares(groups: Ints) -> Floats:
    """[n] weights that let n samples of a prompt count as at most ``_REPEATS``: what more they tell is little."""
    return np.asarray(1 / (1 + (np.bincount(groups)[groups] - 1) / _REPEATS))


def template_shares(words: Sequence[list[str]]) -> Floats:
    """[n] weights that let n prompts which begin or end with the same words count as the root of n."""
    both = [_ends(read) for read in words]
    counted = Counter(end for pair in both for end in pair)
    return np.asarray([1 / np.sqrt(max(counted[end] for end in pair)) for pair in both])


def templates(words: Sequence[list[str]]) -> dict[str, int]:
    """Beginnings and ends that many of the prompts share, numbered."""
    counted = Counter(end for read in words for end in _ends(read))
    return {
        end: place for place, end in enumerate(sorted(e for e, n in counted.items() if n >= _LEAST_TEMPLATE))
    }


def template_of(read: list[str], known: Mapping[str, int]) -> int:
    """Which of the known ends, else beginnings, a prompt has; -1 for none."""
    if not known:
        return -1
    begin, end = _ends(read)
    return known.get(end, known.get(begin, -1))


def _ends(read: list[str]) -> tuple[str, str]:
    return "^" + " ".join(read[:_TEMPLATE_WORDS]), " ".join(read[-_TEMPLATE_WORDS:]) + "$"


def group_means(y: Floats, group: Ints, weight: Floats) -> Floats:
    """[groups] weighted means."""
    return np.asarray(np.bincount(group, weight * y) / np.bincount(group, weight))


def shrunk_means(residual: Floats, group: Ints, weight: Floats) -> Floats:
    """[groups] mean residuals, drawn to that of all groups where samples are few."""
    means, count = group_means(residual, group, weight), np.bincount(group)
    return np.asarray((count * means + SHRINK * means.mean()) / (count + SHRINK))
