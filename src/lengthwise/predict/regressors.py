"""Gradient-boosted trees and small networks as plain arrays: scikit-learn trains them, numpy evaluates them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError, MissingExtraError
from lengthwise.schema.workload import Floats

_TREE_PARTS = ("feature", "threshold", "value")
_FEW_ROWS, _MAX_TABLE_DEPTH = 4, 4
"""Up to this many rows and levels, evaluating all nodes is faster than following one path."""


@dataclass(frozen=True)
class Trees:
    """A sum of t regression trees, all padded to one depth d, so that numpy evaluates them at once.

    ``feature`` [t, 2^d - 1] is the column that each node compares with its ``threshold``, of the same shape. Node i has
    the children 2i + 1 (for values up to the threshold) and 2i + 2. ``value`` [t, 2^d] are the values of the leaves.
    A prediction is ``base`` plus the sum of the t leaves.
    """

    base: float
    feature: npt.NDArray[np.int32]
    threshold: Floats
    value: Floats

    def __post_init__(self) -> None:
        trees, nodes = self.feature.shape
        if self.threshold.shape != (trees, nodes) or self.value.shape != (trees, nodes + 1):
            raise InputError("trees must have a threshold per node and one leaf more than nodes; the file is damaged")
        object.__setattr__(self, "_first", (np.arange(trees) * nodes)[None, :])
        object.__setattr__(self, "_columns", self.feature.astype(np.intp))
        object.__setattr__(self, "_leaves", (np.arange(trees) * (nodes + 1))[None, :])

    @property
    def depth(self) -> int:
        """Return the number of decisions from the root to a leaf."""
        return int(self.value.shape[1]).bit_length() - 1

    def predict(self, x: Floats) -> Floats:
        """Return the predictions [n] for rows of features [n, m]."""
        if self.feature.shape[0] == 0:
            return np.full(len(x), self.base)
        if len(x) <= _FEW_ROWS and self.depth <= _MAX_TABLE_DEPTH:
            return self._by_table(x)
        first, leaves = self._first, self._leaves  # type: ignore[attr-defined]
        feature, threshold = self.feature.ravel(), self.threshold.ravel()
        flat, starts = np.ascontiguousarray(x).ravel(), (np.arange(len(x)) * x.shape[1])[:, None]
        node = np.zeros((len(x), len(self.feature)), np.int64)
        for _ in range(self.depth):
            at = node + first
            right = flat.take(feature.take(at) + starts) > threshold.take(at)
            node = 2 * node + 1 + right
        leaf = node - self.feature.shape[1] + leaves
        return np.asarray(self.base + self.value.ravel().take(leaf).sum(axis=1))

    def _by_table(self, x: Floats) -> Floats:
        """Return the predictions for a few rows: evaluate all nodes, and look up the leaf of each combination."""
        trees, nodes = self.feature.shape
        right = np.packbits(x.take(self._columns, axis=1) > self.threshold, axis=2)  # type: ignore[attr-defined]
        decisions = (right if nodes < 8 else right.view(">u2")).reshape(len(x), trees)
        leaf = _leaf_table(self.depth).take(decisions) + self._leaves  # type: ignore[attr-defined]
        return np.asarray(self.base + self.value.take(leaf).sum(axis=1))

    def to_arrays(self, name: str) -> dict[str, npt.NDArray[Any]]:
        """Return the four attributes as arrays to save; their keys are "``name``.base" and so on."""
        return {f"{name}.base": np.array([self.base])} | {f"{name}.{part}": getattr(self, part) for part in _TREE_PARTS}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]], name: str, columns: int) -> Trees:
        """Return the trees that ``to_arrays(name)`` saved in ``arrays``, for inputs of ``columns`` columns.

        Raises InputError if an array is missing, or a node compares a column that does not exist.
        """
        base, feature, threshold, value = _saved_parts(arrays, name, ("base", *_TREE_PARTS))
        if feature.size and not 0 <= int(feature.min()) <= int(feature.max()) < columns:
            raise InputError(f"trees of {name} read columns that do not exist; train the predictor again")
        return cls(float(base[0]), feature.astype(np.int32), threshold.astype(float), value.astype(float))


@cache
def _leaf_table(depth: int) -> npt.NDArray[np.uint8]:
    """Return the leaf for each combination of decisions, [2^8 or 2^16]; the root's decision is the highest bit."""
    nodes = 2**depth - 1
    bits = 8 if nodes < 8 else 16
    decisions = np.arange(1 << bits)
    node = np.zeros(len(decisions), np.int64)
    for _ in range(depth):
        node = 2 * node + 1 + (decisions >> (bits - 1 - node) & 1)
    return np.asarray(node - nodes, np.uint8)


def fit_trees(
    x: Floats, y: Floats, weight: Floats, *, trees: int, depth: int, seed: int, rate: float = 0.05, min_leaf: int = 20
) -> Trees:
    """Return ``trees`` trees of at most ``depth`` levels, fitted to ``y`` [n] from ``x`` [n, m] by least squares.

    ``weight`` [n] are the weights of the rows, ``rate`` is the learning rate, ``min_leaf`` the smallest number of rows
    in a leaf. With fewer than 2 ``min_leaf`` rows, or equal ``y``, the result has no trees: it predicts the weighted
    mean. Raises MissingExtraError if scikit-learn is not installed.
    """
    try:
        from sklearn.ensemble import HistGradientBoostingRegressor
        from threadpoolctl import threadpool_limits
    except ImportError as error:
        raise MissingExtraError("training the lexical predictor", "predict") from error
    if len(y) < 2 * min_leaf or float(np.ptp(y)) == 0:
        mean = float(np.average(y, weights=weight))
        return Trees(mean, np.zeros((0, 1), np.int32), np.zeros((0, 1)), np.zeros((0, 2)))
    model: Any = HistGradientBoostingRegressor(
        learning_rate=rate,
        max_iter=trees,
        max_depth=depth,
        max_leaf_nodes=None,
        min_samples_leaf=min_leaf,
        l2_regularization=5.0,
        max_features=0.2,
        early_stopping=False,
        random_state=seed,
    )
    with threadpool_limits(1):  # the order of sums is then reproducible
        model.fit(x, y, weight)
    return _padded(model, depth)


def _padded(model: Any, depth: int) -> Trees:
    grown = [stage[0].nodes for stage in model._predictors]  # noqa: SLF001 - it has no public form
    nodes = 2**depth - 1
    feature = np.zeros((len(grown), nodes), np.int32)
    threshold = np.full((len(grown), nodes), np.inf)
    value = np.zeros((len(grown), nodes + 1))
    for tree, rows in enumerate(grown):
        stack = [(0, 0)]
        while stack:
            row, place = stack.pop()
            is_leaf = bool(rows[row]["is_leaf"])
            if place >= nodes:
                value[tree, place - nodes] = rows[row]["value"]
                continue
            if not is_leaf:
                feature[tree, place] = rows[row]["feature_idx"]
                threshold[tree, place] = rows[row]["num_threshold"]
            children = (row, row) if is_leaf else (int(rows[row]["left"]), int(rows[row]["right"]))
            stack += [(children[0], 2 * place + 1), (children[1], 2 * place + 2)]
    return Trees(float(np.ravel(model._baseline_prediction)[0]), feature, threshold, value)  # noqa: SLF001


_CLIP = 4.0
_NETWORKS = 3
_UNITS = 64
_PARTS = ("middle", "spread", "first", "first_bias", "second", "second_bias")


@dataclass(frozen=True)
class Head:
    """The mean of k networks on m standardized columns, each with one hidden layer of u units (ReLU).

    ``middle`` and ``spread`` [m] are the mean and the standard deviation of each column (see ``standardized``).
    ``first`` [k, m, u] and ``first_bias`` [k, u] are the weights of the hidden layers, ``second`` [k, u] and
    ``second_bias`` [k] those of the outputs.
    """

    middle: Floats
    spread: Floats
    first: Floats
    first_bias: Floats
    second: Floats
    second_bias: Floats

    def __call__(self, x: npt.NDArray[Any]) -> Floats:
        """Return the predictions [n] for rows of columns [n, m]."""
        z = standardized(x, self.middle, self.spread)
        out = np.zeros(len(z))
        for w, b, v, c in zip(self.first, self.first_bias, self.second, self.second_bias, strict=True):
            hidden = np.maximum(np.einsum("ij,jk->ik", z, w) + b, 0)  # no threads, unlike BLAS
            out += np.einsum("ij,j->i", hidden, v) + c
        return out / len(self.first)

    def to_arrays(self, name: str) -> dict[str, npt.NDArray[Any]]:
        """Return the six attributes as float32 arrays to save; their keys are "``name``.middle" and so on."""
        return {f"{name}.{part}": getattr(self, part).astype(np.float32) for part in _PARTS}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]], name: str, columns: int) -> Head:
        """Return the networks that ``to_arrays(name)`` saved. Raises InputError if an array is missing or invalid."""
        parts = [part.astype(np.float64) for part in _saved_parts(arrays, name, _PARTS)]
        k, _, u = parts[2].shape if parts[2].ndim == 3 else (0, 0, 0)
        shapes = [(columns,), (columns,), (k, columns, u), (k, u), (k, u), (k,)]
        if k == 0 or [part.shape for part in parts] != shapes or not all(np.isfinite(p).all() for p in parts):
            raise InputError(f"the networks of {name} must fit {columns} columns and be finite; train it again")
        return cls(*parts)


def _saved_parts(arrays: Mapping[str, npt.NDArray[Any]], name: str, parts: tuple[str, ...]) -> list[npt.NDArray[Any]]:
    if lacking := [f"{name}.{part}" for part in parts if f"{name}.{part}" not in arrays]:
        raise InputError(f"the model file lacks {lacking[0]!r}; train it again")
    return [arrays[f"{name}.{part}"] for part in parts]


def standardized(x: npt.NDArray[Any], middle: Floats, spread: Floats) -> Floats:
    """Return (x - middle) / spread for columns ``x`` [n, m], clipped to -4 .. 4."""
    return np.minimum(np.maximum((x - middle) / spread, -_CLIP), _CLIP)


def fit_head(
    x: npt.NDArray[Any], y: Floats, weight: Floats, seed: int, *, decay: float = 3.0, rounds: int = 12
) -> Head:
    """Return three networks fitted to ``y`` [n] from ``x`` [n, m] by least squares with ``weight`` [n].

    ``decay`` is the L2 penalty of the weights and ``rounds`` the number of epochs. Each network has its own random
    seed. Raises MissingExtraError if scikit-learn is not installed.
    """
    try:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.neural_network import MLPRegressor
        from threadpoolctl import threadpool_limits
    except ImportError as error:
        raise MissingExtraError("training the encoder predictor", "predict") from error
    middle, spread = x.mean(axis=0, dtype=float), np.maximum(x.std(axis=0, dtype=float), 1e-6)
    z = standardized(x, middle, spread).astype(np.float32)
    made = []
    for network in range(_NETWORKS):
        model: Any = MLPRegressor(
            hidden_layer_sizes=(_UNITS,),
            alpha=decay,
            max_iter=rounds,
            learning_rate_init=1e-3,
            batch_size=min(128, len(y)),
            n_iter_no_change=rounds + 1,
            random_state=seed * _NETWORKS + network,
        )
        with warnings.catch_warnings(), threadpool_limits(1):  # on one core the order of sums is reproducible
            warnings.simplefilter("ignore", ConvergenceWarning)  # the number of rounds is fixed on purpose
            made.append(model.fit(z, y.astype(np.float32), sample_weight=weight / weight.mean()))
    first, second = (np.stack([np.asarray(m.coefs_[layer]) for m in made]) for layer in (0, 1))
    bias, last = (np.stack([np.asarray(m.intercepts_[layer]) for m in made]) for layer in (0, 1))
    parts = (middle, spread, first, bias, second[:, :, 0], last[:, 0])
    return Head(*(part.astype(np.float32).astype(np.float64) for part in parts))  # as a file stores it
