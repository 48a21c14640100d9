"""The lexical predictor on the disk: plain numbers, and the learnt words as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lengthwise.predict._endings import Axes
from lengthwise.predict._lexical_fit import Location
from lengthwise.predict._state import Arrays, State, array
from lengthwise.predict.distribution import LEVELS
from lengthwise.predict.encoder_head import Head
from lengthwise.predict.features import NAMES
from lengthwise.predict.lexical_trees import Trees
from lengthwise.predict.lexical_windows import COLUMNS, Windows
from lengthwise.predict.progress import PROGRESS
from lengthwise.schema.errors import InputError

if TYPE_CHECKING:
    from lengthwise.predict.lexical import Lexical

LAYOUT = 1
"""Changes whenever a feature does: trees mean nothing on other columns."""


def packed(model: Lexical) -> State:
    """JSON and arrays of a trained predictor; words without a weight are left out."""
    location: Location = model.location_
    kept = {term: weight for term, weight in location.weights.items() if weight and location.share}
    meta = {
        "layout": [LAYOUT, len(NAMES), len(PROGRESS)],
        "seed": model.seed,
        "window_tokens": model.window_tokens,
        "most_windows": model.most_windows,
        "share": location.share,
        "offsets": model.offsets_,
        "other": model.other_,
        "templates": model.templates_,
        "habits": model.habits_,
        "most_tokens": model.most_tokens_,
        "horizon": model.windows_.horizon,
    }
    arrays: Arrays = {
        "terms": np.frombuffer("\n".join(kept).encode(), np.uint8),
        "weights": np.array(list(kept.values()), np.float64),
        "linear": location.linear,
        "middle": location.middle,
        "spread": location.spread,
        "seen": model.seen_,
        "z": model.z_,
        "windows.z": model.windows_.z,
        "windows.base_z": model.windows_.base_z,
    }
    trees = (location.trees, model.scale_, model.windows_.middle, model.windows_.scale)
    for name, tree in zip(_TREES, trees, strict=True):
        arrays |= tree.arrays(name)
    if location.sense is not None:
        arrays |= location.sense.arrays("sense") | {"sense.share": np.array(location.sense_share)}
    if model.windows_.axes is not None:
        arrays |= {"axes.middle": model.windows_.axes.middle, "axes.turn": model.windows_.axes.turn}
    return meta, arrays


def unpack(model: Lexical, meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Puts the state into a predictor.

    Raises:
        InputError: It is of other features, or an array does not have its shape.
    """
    if list(meta["layout"]) != [LAYOUT, len(NAMES), len(PROGRESS)]:
        raise InputError(
            f"the model was trained on other features ({meta['layout']}) than this version reads "
            f"({[LAYOUT, len(NAMES), len(PROGRESS)]}); train it again"
        )
    terms = arrays["terms"].astype(np.uint8).tobytes().decode().split("\n")
    weights = array(arrays, "weights", 1)
    if len(weights) != len([t for t in terms if t]):
        raise InputError(f"there must be a weight a term ({len(terms)}); there are {len(weights)}")
    shapes = {"linear": (len(NAMES) + 1,), "middle": (len(NAMES),), "spread": (len(NAMES),)}
    linear, middle, spread = (_shaped(arrays, name, shape) for name, shape in shapes.items())
    axes = _axes(arrays)
    window = COLUMNS + (0 if axes is None else axes.turn.shape[1])
    columns = (len(NAMES), len(NAMES) + 1, window, window)
    trees = [Trees.of_arrays(dict(arrays), n, c) for n, c in zip(_TREES, columns, strict=True)]
    words = dict(zip(terms, weights.tolist(), strict=False)) if len(weights) else {}
    model.location_ = Location(
        words, linear, middle, spread, float(meta["share"]), trees[0], **_sense(arrays)
    )
    model.seen_ = array(arrays, "seen", 1).astype(np.uint32)
    model.scale_ = trees[1]
    model.z_ = _shaped(arrays, "z", (2, len(LEVELS)))
    bands = _shaped(arrays, "windows.z", (10, len(LEVELS)))
    base = _shaped(arrays, "windows.base_z", (len(LEVELS),))
    model.windows_ = Windows(trees[2], trees[3], bands, base, max(1, int(meta["horizon"])), axes)
    model.offsets_ = {str(name): float(offset) for name, offset in meta["offsets"].items()}
    model.templates_ = {str(end): int(place) for end, place in meta["templates"].items()}
    model.habits_ = {str(key): float(habit) for key, habit in meta["habits"].items()}
    model.other_, model.most_tokens_ = float(meta["other"]), float(meta["most_tokens"])


def _sense(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Any]:
    """The networks of a location, if it has some; how long vectors are, they themselves say."""
    if "sense.share" not in arrays:
        return {}
    columns = array(arrays, "sense.middle", 1).shape[0]
    share = float(array(arrays, "sense.share", 0))
    return {"sense": Head.of_arrays(arrays, "sense", columns), "sense_share": share}


def _axes(arrays: Mapping[str, npt.NDArray[Any]]) -> Axes | None:
    if "axes.turn" not in arrays:
        return None
    turn = array(arrays, "axes.turn", 2)
    return Axes(_shaped(arrays, "axes.middle", (len(turn),)), turn)


_TREES = ("location", "scale", "windows.middle", "windows.scale")


def _shaped(
    arrays: Mapping[str, npt.NDArray[Any]], name: str, shape: tuple[int, ...]
) -> npt.NDArray[np.float64]:
    found = array(arrays, name, len(shape))
    if found.shape != shape:
        raise InputError(f"{name} must have the shape {shape}; it has {found.shape}")
    return found
