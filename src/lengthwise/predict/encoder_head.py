"""Small networks on top of a sentence encoder, as plain arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError, MissingExtraError

Floats = npt.NDArray[np.float64]

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

    middle: Floats
    spread: Floats
    first: Floats
    first_bias: Floats
    second: Floats
    second_bias: Floats

    def __call__(self, x: npt.NDArray[Any]) -> Floats:
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
            raise InputError(
                f"the networks of {name} must fit {columns} columns and be finite; train it again"
            )
        return cls(*parts)


def standard(x: npt.NDArray[Any], middle: Floats, spread: Floats) -> Floats:
    """Columns in standard deviations, at most four of them from the middle."""
    return np.clip((x - middle) / spread, -_CLIP, _CLIP)


def learn_head(
    x: npt.NDArray[Any], y: Floats, weight: Floats, seed: int, *, decay: float = 3.0, rounds: int = 12
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


def _trained(model: Any, z: Any, y: Any, weight: Floats, limits: Any) -> Any:
    """A network that stopped when its rounds were over, as it was told; that is no cause for a warning."""
    import warnings

    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings(), limits(1):  # on one core the order of sums is always the same
        warnings.simplefilter("ignore", ConvergenceWarning)
        return model.fit(z, y, sample_weight=weight)
