"""What a mean over micro-batches that may be empty, and are not alike, is made of.

Compiled into the kernel, and called as it is.
"""

from __future__ import annotations

import math

_FEW = 4.0
"""Sequences of a micro-batch up to which it is asked how often there is none; from twice as many on it is not."""


def rare(seqs: float, each: float, alone: bool) -> tuple[float, float]:
    """(how often there is one, how many times the mean sequences there then are), of ``seqs`` in the mean.

    An empty micro-batch takes no time: what is expected is that of one that is not, as often as there is one. Its
    ``each`` requests end one apart from the other, so with p of them still there it is empty in (1 - p)^each.
    ``alone``: as one of them sees it that is there for certain. Between ``_FEW`` and twice as many the correction
    fades, so that nothing jumps where it ends.
    """
    if not 0.0 < seqs < min(each, 2.0 * _FEW):
        return 1.0, 1.0
    gone, counts = 1.0 - seqs / each, min(1.0, 2.0 - seqs / _FEW)
    if alone:
        return 1.0, 1.0 + counts * gone / seqs
    there = 1.0 - counts * gone**each
    return there, 1.0 / there


def beyond(seqs: float, dispersion: float, score: float) -> float:
    """Sequences that the largest micro-batch has more than one that is not empty, which has ``seqs`` in the mean.

    ``dispersion`` is a micro-batch's variance over its mean, ``score`` the deviations by which the largest is expected
    beyond the mean. Of those that are not empty one at least is no part of what varies.
    """
    return score * math.sqrt(max(seqs - 1.0, 0.0) * min(dispersion, 1.0))


def part(new: float, parts: int, place: int) -> float:
    """How many times the mean the ``place``-th smallest part has, as even as whole requests allow."""
    whole = math.floor(new + 0.5)
    if whole <= parts:
        return 1.0
    least = whole // parts
    larger = whole - least * parts
    return (least + (1 if place >= parts - larger else 0)) * parts / whole


def pace(there: float, parts: int, longest: float, largest_s: float, whole_s: float) -> float:
    """How many times its own seconds a visit takes, in the mean, at the pace of its iteration.

    An iteration is as long as the slowest stage is busy, with as many of the micro-batches as are ``there``, or as the
    way of the longest of them through all stages, if there is one at all: nobody begins anew before.

    Args:
        there: How often a micro-batch is not empty.
        parts: Micro-batches.
        longest: How many times the mean visit that of the longest takes.
        largest_s: Seconds of the slowest stage's visit.
        whole_s: Seconds of the visits of all stages.
    """
    alike_s = max(parts * largest_s, whole_s)
    if alike_s <= 0.0:
        return there
    return max(there * parts * largest_s, (1.0 - (1.0 - there) ** parts) * longest * whole_s) / alike_s
