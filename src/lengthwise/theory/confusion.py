"""Which bin a request is put into when its length is predicted: confusion matrices [true, predicted]."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError
from lengthwise.theory.boundaries import checked_counts
from lengthwise.theory.service import Floats


def neighbours(bins: int, below: float, above: float | None = None) -> Floats:
    """[k, k] the error model of Section 6.2: one bin too low or too high, never farther.

    Args:
        bins: Their number.
        below: Probability that bin i > 0 is taken for bin i - 1.
        above: Probability that bin i < k - 1 is taken for bin i + 1; the same as ``below`` by default.
    """
    checked_counts(1, bins)
    above = below if above is None else above
    if not (below >= 0 and above >= 0 and below + above <= 1):
        raise InputError(
            f"the probabilities of a bin too low and too high must be at least 0 and together at most 1; "
            f"they are {below:g} and {above:g}"
        )
    matrix = np.diag(np.full(bins - 1, below), -1) + np.diag(np.full(bins - 1, above), 1)
    return np.asarray(matrix + np.diag(1 - matrix.sum(axis=1)))


def of_accuracy(bins: int, accuracy: float, within_one: float = 1.0) -> Floats:
    """[k, k] a matrix with this mean accuracy, whose errors fall on neighbours first.

    ``within_one`` is the share of predictions in the true bin or beside it. What lies farther falls
    evenly on the other bins.

    Raises:
        InputError: There is no such matrix.
    """
    checked_counts(1, bins)
    if not 0 <= accuracy <= within_one <= 1:
        raise InputError(
            f"need 0 <= accuracy <= within one bin <= 1; they are {accuracy:g} and {within_one:g}"
        )
    if bins == 1:
        return np.ones((1, 1))
    far = 1 - within_one
    distance = np.abs(np.subtract.outer(np.arange(bins), np.arange(bins)))
    beyond = (distance > 1).astype(float)
    spread = far * beyond * bins / max(beyond.sum(), 1)
    left = 1 - spread.sum(axis=1)
    near = (within_one - accuracy) * bins / (2 * (bins - 1)) * (distance == 1)
    own = left - near.sum(axis=1)
    if (own < -1e-12).any() or (left < -1e-12).any() or (far > 0 and beyond.sum() == 0):
        raise InputError(
            f"no matrix of {bins} bins with errors on neighbours has accuracy {accuracy:g} and "
            f"{within_one:g} within one bin; raise the accuracy or lower the other"
        )
    return np.asarray(spread + near + np.diag(np.maximum(own, 0.0)))


def of_predictions(true_bin: npt.ArrayLike, predicted_bin: npt.ArrayLike, bins: int) -> Floats:
    """[k, k] what predictions did: shares by true bin; a bin that never came stays itself."""
    checked_counts(1, bins)
    true, predicted = np.asarray(true_bin, np.int64), np.asarray(predicted_bin, np.int64)
    if true.shape != predicted.shape or true.ndim != 1:
        raise InputError(
            f"true and predicted bins must be two columns of one length; {true.shape}, {predicted.shape}"
        )
    for name, column in (("true", true), ("predicted", predicted)):
        if len(column) and not (column.min() >= 0 and column.max() < bins):
            raise InputError(
                f"{name} bins must lie within 0 to {bins - 1}; found {column.min()} to {column.max()}"
            )
    counts = np.zeros((bins, bins))
    np.add.at(counts, (true, predicted), 1.0)
    totals = counts.sum(axis=1, keepdims=True)
    return np.where(totals > 0, counts / np.maximum(totals, 1), np.eye(bins))


def confuse(
    true_bin: npt.ArrayLike, confusion: npt.ArrayLike, levels: npt.ArrayLike
) -> npt.NDArray[np.int64]:
    """[n] the bin that each request is put into.

    Args:
        true_bin: [n] where it belongs.
        confusion: [k, k] rows of probabilities.
        levels: [n] draws within 0 to 1: the randomness, given so that runs can share it.
    """
    matrix = checked_confusion(confusion, len(np.atleast_2d(np.asarray(confusion))))
    true, drawn = np.asarray(true_bin, np.int64), np.asarray(levels, float)
    put = np.empty(len(true), np.int64)
    for row, chances in enumerate(matrix):
        (members,) = np.nonzero(true == row)
        put[members] = np.searchsorted(np.cumsum(chances)[:-1], drawn[members], side="right")
    return put


def checked_confusion(confusion: npt.ArrayLike, bins: int) -> Floats:
    """The matrix as an array; raises InputError where it is not one of ``bins`` rows of probabilities."""
    matrix = np.asarray(confusion, float)
    if matrix.shape != (bins, bins):
        raise InputError(
            f"a confusion matrix of {bins} bins has shape ({bins}, {bins}); this has {matrix.shape}"
        )
    if not ((matrix >= 0).all() and np.allclose(matrix.sum(axis=1), 1, atol=1e-9)):
        raise InputError("each row of a confusion matrix must hold probabilities that add up to 1")
    return matrix
