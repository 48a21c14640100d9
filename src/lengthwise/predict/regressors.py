"""Gradient-boosted trees as plain arrays: learnt with scikit-learn, read with numpy alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError, MissingExtraError

Floats = npt.NDArray[np.float64]

_MIN_COUNT, _MOST_AT_ONCE = 4, 4
"""Up to so many rows, and decisions, it is faster to take them all than to walk."""


@dataclass(frozen=True)
class Trees:
    """A sum of t regression trees, each filled up to the same depth d, so that all are walked at once.

    Attributes:
        base: What is added to their sum.
        feature: [t, 2^d - 1] int32, the column that a node looks at; its children are 2i + 1 and 2i + 2.
        threshold: [t, 2^d - 1] float64, the left child is taken up to it.
        value: [t, 2^d] float64, what a leaf adds.
    """

    base: float
    feature: npt.NDArray[np.int32]
    threshold: Floats
    value: Floats

    def __post_init__(self) -> None:
        trees, nodes = self.feature.shape
        if self.threshold.shape != (trees, nodes) or self.value.shape != (trees, nodes + 1):
            raise InputError("trees must have a threshold a node and one leaf more than nodes; the file is damaged")
        object.__setattr__(self, "_first", (np.arange(trees) * nodes)[None, :])
        object.__setattr__(self, "_columns", self.feature.astype(np.intp))
        object.__setattr__(self, "_leaves", (np.arange(trees) * (nodes + 1))[None, :])

    @property
    def depth(self) -> int:
        """Decisions from root to leaf."""
        return int(self.value.shape[1]).bit_length() - 1

    def predict(self, x: Floats) -> Floats:
        """[n] float64, for rows of features [n, m]."""
        if self.feature.shape[0] == 0:
            return np.full(len(x), self.base)
        if len(x) <= _MIN_COUNT and self.depth <= _MOST_AT_ONCE:
            return self._at_once(x)
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

    def _at_once(self, x: Floats) -> Floats:
        """The same for a few rows: all nodes decide at once, and a table says which leaf that leads to."""
        trees, nodes = self.feature.shape
        right = np.packbits(x.take(self._columns, axis=1) > self.threshold, axis=2)  # type: ignore[attr-defined]
        turns = (right if nodes < 8 else right.view(">u2")).reshape(len(x), trees)
        leaf = _leaf_of(self.depth).take(turns) + self._leaves  # type: ignore[attr-defined]
        return np.asarray(self.base + self.value.take(leaf).sum(axis=1))

    def arrays(self, name: str) -> dict[str, npt.NDArray[Any]]:
        """Its arrays, under a name, for a file."""
        return {
            f"{name}.base": np.array([self.base]),
            f"{name}.feature": self.feature,
            f"{name}.threshold": self.threshold,
            f"{name}.value": self.value,
        }

    @classmethod
    def of_arrays(cls, arrays: dict[str, npt.NDArray[Any]], name: str, columns: int) -> Trees:
        """What ``arrays`` gave, checked: no node may look beyond the columns.

        Raises:
            InputError: An array is missing or cannot be one of trees over so many columns.
        """
        try:
            base, feature, threshold, value = (
                arrays[f"{name}.{part}"] for part in ("base", "feature", "threshold", "value")
            )
        except KeyError as error:
            raise InputError(f"the model file lacks {error}; train it again") from error
        if feature.size and not 0 <= int(feature.min()) <= int(feature.max()) < columns:
            raise InputError(f"trees of {name} look at columns that do not exist; train the predictor again")
        return cls(float(base[0]), feature.astype(np.int32), threshold.astype(float), value.astype(float))


@cache
def _leaf_of(depth: int) -> npt.NDArray[np.uint8]:
    """[2^8 or 2^16] the leaf that is reached by which nodes turn right; the first node is the highest bit.

    In bytes, so that it stays in the cache.
    """
    nodes = 2**depth - 1
    bits = 8 if nodes < 8 else 16
    turns = np.arange(1 << bits)
    node = np.zeros(len(turns), np.int64)
    for _ in range(depth):
        node = 2 * node + 1 + (turns >> (bits - 1 - node) & 1)
    return np.asarray(node - nodes, np.uint8)


def grow(
    x: Floats, y: Floats, weight: Floats, *, trees: int, depth: int, seed: int, rate: float = 0.05, least: int = 20
) -> Trees:
    """Trees that follow ``y`` [n] from ``x`` [n, m] by weighted least squares.

    Raises:
        MissingExtraError: scikit-learn is not installed.
    """
    try:
        from sklearn.ensemble import HistGradientBoostingRegressor
        from threadpoolctl import threadpool_limits
    except ImportError as error:
        raise MissingExtraError("training the lexical predictor", "predict") from error
    if len(y) < 2 * least or float(np.ptp(y)) == 0:
        return _constant(float(np.average(y, weights=weight)))
    model = HistGradientBoostingRegressor(
        learning_rate=rate,
        max_iter=trees,
        max_depth=depth,
        max_leaf_nodes=None,
        min_samples_leaf=least,
        l2_regularization=5.0,
        max_features=0.2,
        early_stopping=False,
        random_state=seed,
    )
    with threadpool_limits(1):  # the order of sums is then always the same
        model.fit(x, y, weight)
    return _filled(model, depth)


def _constant(value: float) -> Trees:
    return Trees(value, np.zeros((0, 1), np.int32), np.zeros((0, 1)), np.zeros((0, 2)))


def _filled(model: Any, depth: int) -> Trees:
    """The trees of a fitted model, short branches continued down to the full depth."""
    grown = [stage[0].nodes for stage in model._predictors]  # noqa: SLF001 - it has no public form
    nodes = 2**depth - 1
    feature = np.zeros((len(grown), nodes), np.int32)
    threshold = np.full((len(grown), nodes), np.inf)
    value = np.zeros((len(grown), nodes + 1))
    for tree, rows in enumerate(grown):
        places = [(0, 0)]
        while places:
            row, place = places.pop()
            leaf = bool(rows[row]["is_leaf"])
            if place >= nodes:
                value[tree, place - nodes] = rows[row]["value"]
                continue
            if not leaf:
                feature[tree, place] = rows[row]["feature_idx"]
                threshold[tree, place] = rows[row]["num_threshold"]
            children = (row, row) if leaf else (int(rows[row]["left"]), int(rows[row]["right"]))
            places += [(children[0], 2 * place + 1), (children[1], 2 * place + 2)]
    return Trees(float(np.ravel(model._baseline_prediction)[0]), feature, threshold, value)  # noqa: SLF001


FloatArray = npt.NDArray[np.float64]

_CLIP = 4.0
_NETWORKS = 3
_UNITS = 64
_PARTS = ("middle", "spread", "first", "first_bias", "second", "second_bias")


@dataclass(frozen=True)
class Head:
    """The mean of k networks of one hidden layer of u units (ReLU), over standardised columns.

    Attributes:
        middle: [m] what is taken from each column.
        spread: [m] what it is then divided by; what is beyond 4 counts as 4.
        first: [k, m, u] weights of the hidden layers.
        first_bias: [k, u].
        second: [k, u] weights of what comes out.
        second_bias: [k].
    """

    middle: FloatArray
    spread: FloatArray
    first: FloatArray
    first_bias: FloatArray
    second: FloatArray
    second_bias: FloatArray

    def __call__(self, x: npt.NDArray[Any]) -> FloatArray:
        """[n] for rows of columns [n, m]."""
        z = standard(x, self.middle, self.spread)
        out = np.zeros(len(z))
        for w, b, v, c in zip(self.first, self.first_bias, self.second, self.second_bias, strict=True):
            hidden = np.maximum(np.einsum("ij,jk->ik", z, w) + b, 0)  # no threads, unlike BLAS
            out += np.einsum("ij,j->i", hidden, v) + c
        return out / len(self.first)

    def rounded(self) -> Head:
        """The same in the 32 bits that a file holds."""
        return Head(*(getattr(self, part).astype(np.float32).astype(np.float64) for part in _PARTS))

    def arrays(self, name: str) -> dict[str, npt.NDArray[Any]]:
        """Its arrays, under a name, for a file."""
        return {f"{name}.{part}": getattr(self, part).astype(np.float32) for part in _PARTS}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]], name: str, columns: int) -> Head:
        """What ``arrays`` gave, checked against the columns that it will be given."""
        try:
            parts = [arrays[f"{name}.{part}"].astype(np.float64) for part in _PARTS]
        except KeyError as error:
            raise InputError(f"the model file lacks {error}; train it again") from error
        k, _, u = parts[2].shape if parts[2].ndim == 3 else (0, 0, 0)
        shapes = [(columns,), (columns,), (k, columns, u), (k, u), (k, u), (k,)]
        if k == 0 or [part.shape for part in parts] != shapes or not all(np.isfinite(p).all() for p in parts):
            raise InputError(f"the networks of {name} must fit {columns} columns and be finite; train it again")
        return cls(*parts)


def standard(x: npt.NDArray[Any], middle: FloatArray, spread: FloatArray) -> FloatArray:
    """Columns in standard deviations, at most four of them from the middle."""
    return np.clip((x - middle) / spread, -_CLIP, _CLIP)


def learn_head(
    x: npt.NDArray[Any], y: FloatArray, weight: FloatArray, seed: int, *, decay: float = 3.0, rounds: int = 12
) -> Head:
    """Networks that follow ``y`` [n] from ``x`` [n, m] by weighted least squares; no two seeds alike.

    Raises:
        MissingExtraError: scikit-learn is not installed.
    """
    try:
        from sklearn.neural_network import MLPRegressor
        from threadpoolctl import threadpool_limits
    except ImportError as error:
        raise MissingExtraError("training the encoder predictor", "predict") from error
    middle, spread = x.mean(axis=0, dtype=float), np.maximum(x.std(axis=0, dtype=float), 1e-6)
    z = standard(x, middle, spread).astype(np.float32)
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
        made.append(_trained(model, z, y.astype(np.float32), weight / weight.mean(), threadpool_limits))
    first, second = (np.stack([np.asarray(m.coefs_[layer]) for m in made]) for layer in (0, 1))
    bias, last = (np.stack([np.asarray(m.intercepts_[layer]) for m in made]) for layer in (0, 1))
    parts = (middle, spread, first, bias, second[:, :, 0], last[:, 0])
    return Head(*parts).rounded()  # as it will be saved


def _trained(model: Any, z: Any, y: Any, weight: FloatArray, limits: Any) -> Any:
    """A network that stopped when its rounds were over, as it was told; that is no cause for a warning."""
    import warnings

    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings(), limits(1):  # on one core the order of sums is always the same
        warnings.simplefilter("ignore", ConvergenceWarning)
        return model.fit(z, y, sample_weight=weight)
