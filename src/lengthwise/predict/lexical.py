"""Gradient-boosted quantiles on what the words of a prompt say: under 0.1 ms a prompt."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from lengthwise.predict.contract import Ints, Prompts, Samples
from lengthwise.predict.distribution import LEVELS, Floats, LengthDistribution
from lengthwise.predict.features import NAMES, PROGRESS, Axes, prompt_features
from lengthwise.predict.lexical_model import (
    COLUMNS,
    Design,
    Location,
    Vectors,
    Windows,
    imputed,
    learn_windows,
    residual_quantiles,
)
from lengthwise.predict.regressors import Head, Trees, grow
from lengthwise.predict.serialization import Arrays, State, array, fitted
from lengthwise.schema.errors import InputError

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
    if location.direction is not None:
        arrays |= location.direction.arrays("sense") | {"sense.share": np.array(location.sense_share)}
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
    model.location_ = Location(words, linear, middle, spread, float(meta["share"]), trees[0], **_sense(arrays))
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
    return {"direction": Head.of_arrays(arrays, "sense", columns), "sense_share": share}


def _axes(arrays: Mapping[str, npt.NDArray[Any]]) -> Axes | None:
    if "axes.turn" not in arrays:
        return None
    turn = array(arrays, "axes.turn", 2)
    return Axes(_shaped(arrays, "axes.middle", (len(turn),)), turn)


_TREES = ("location", "scale", "windows.middle", "windows.scale")


def _shaped(arrays: Mapping[str, npt.NDArray[Any]], name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    found = array(arrays, name, len(shape))
    if found.shape != shape:
        raise InputError(f"{name} must have the shape {shape}; it has {found.shape}")
    return found


FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

SHRINK = 5.0
"""Samples that a group must have to be trusted by half."""
_REPEATS = 4.0
_TEMPLATE_WORDS, _LEAST_TEMPLATE = 4, 40


def root_shares(groups: IntArray) -> FloatArray:
    """[n] weights that let a group of n samples count as the root of n."""
    return np.asarray(1 / np.sqrt(np.bincount(groups)[groups]))


def repeat_shares(groups: IntArray) -> FloatArray:
    """[n] weights that let n samples of a prompt count as at most ``_REPEATS``: what more they tell is little."""
    return np.asarray(1 / (1 + (np.bincount(groups)[groups] - 1) / _REPEATS))


def template_shares(words: Sequence[list[str]]) -> FloatArray:
    """[n] weights that let n prompts which begin or end with the same words count as the root of n."""
    both = [_ends(read) for read in words]
    counted = Counter(end for pair in both for end in pair)
    return np.asarray([1 / np.sqrt(max(counted[end] for end in pair)) for pair in both])


def templates(words: Sequence[list[str]]) -> dict[str, int]:
    """Beginnings and ends that many of the prompts share, numbered."""
    counted = Counter(end for read in words for end in _ends(read))
    return {end: place for place, end in enumerate(sorted(e for e, n in counted.items() if n >= _LEAST_TEMPLATE))}


def template_of(read: list[str], known: Mapping[str, int]) -> int:
    """Which of the known ends, else beginnings, a prompt has; -1 for none."""
    if not known:
        return -1
    begin, end = _ends(read)
    return known.get(end, known.get(begin, -1))


def _ends(read: list[str]) -> tuple[str, str]:
    return "^" + " ".join(read[:_TEMPLATE_WORDS]), " ".join(read[-_TEMPLATE_WORDS:]) + "$"


def group_means(y: FloatArray, group: IntArray, weight: FloatArray) -> FloatArray:
    """[groups] weighted means."""
    return np.asarray(np.bincount(group, weight * y) / np.bincount(group, weight))


def shrunk_means(residual: FloatArray, group: IntArray, weight: FloatArray) -> FloatArray:
    """[groups] mean residuals, drawn to that of all groups where samples are few."""
    means, count = group_means(residual, group, weight), np.bincount(group)
    return np.asarray((count * means + SHRINK * means.mean()) / (count + SHRINK))


OTHER = ""
"""Stands for every model that was not seen."""
_ROUNDS = 2
_LEAST_SCALE = 0.02
_MODELS, _MODELS_SD = 3.0, 0.35
"""What is thought of models before any is seen: so many, whose log lengths differ by such a deviation."""
_OUT_OF_RANGE = 4.0
_MEDIAN = int(np.searchsorted(LEVELS, 0.5))


class Lexical:
    """Length = its model's typical length x what the prompt calls for x a spread of its own.

    On the logarithm of tokens: an offset a model (models that were not seen share one, and a wider
    spread); a location, half ridge regression on words and pairs of words, half boosted trees on
    counts, marks and a reader's guesses, the shares chosen by cross-validation over prompts; a scale by
    boosted trees; and the quantiles of the residuals over it on prompts left out. Cut outputs count as
    longer than seen: in the location by the mean of longer residuals (Buckley and James 1979), in the
    quantiles by Kaplan and Meier. Of models and of templates the root of the number counts, of repeated
    prompts little, so that many alike do not drown the few; a template that many prompts begin or end with
    has an offset of its own, and one for each model. Once tokens have come, a second such model on
    the first one's answer, the tokens so far, and their text where it is given, tells what is left.

    Args:
        seed: Of folds and of the windows that are drawn.
        window_tokens: What comes is looked at in steps of so many tokens.
        most_windows: Windows learnt from, drawn from all.
    """

    kind: ClassVar[str] = "lexical"
    reads_text: ClassVar[bool] = True

    def __init__(self, seed: int = 0, window_tokens: int = 50, most_windows: int = 20_000) -> None:
        if window_tokens < 1 or most_windows < 1:
            raise InputError(f"window_tokens and most_windows must be at least 1; got {window_tokens}, {most_windows}")
        self.seed, self.window_tokens, self.most_windows = seed, window_tokens, most_windows

    def fit(self, samples: Samples) -> Self:
        """Learns from samples that have texts of prompts; needs scikit-learn (extra ``predict``).

        Raises:
            InputError: There are no texts, or every output was cut.
            MissingExtraError: scikit-learn is not installed.
        """
        texts = samples.prompts.text
        if texts is None:
            raise InputError("the lexical predictor learns from texts of prompts; these samples have none")
        if samples.censored.all():
            raise InputError("every output was cut at a limit; some must have ended by themselves")
        prompts, prompt = np.unique([text.strip() for text in texts], return_inverse=True)
        features, words = prompt_features([str(text) for text in prompts])
        names = [model_key(name) for name in samples.prompts.model or [OTHER] * len(samples)]
        models, model = np.unique(names, return_inverse=True)
        weight = repeat_shares(prompt) * root_shares(model) * template_shares(words)[prompt]
        y = np.log(samples.output_tokens.astype(float))
        vectors = self._vectors([str(text) for text in prompts])
        design = Design(features, words, self.seed, vectors)
        held, offset = np.zeros(len(y)), group_means(y, model, weight)
        for _ in range(_ROUNDS):
            full = imputed(y, samples.censored, held + offset[model])
            offset = shrunk_means(full - held, model, weight)
            total = np.asarray(np.bincount(prompt, weight), float)
            target = np.bincount(prompt, weight * (full - offset[model])) / total
            held = design.fast(target, total)[prompt]
        full = imputed(y, samples.censored, held + offset[model])
        total = np.asarray(np.bincount(prompt, weight), float)
        self.location_, out = design.locate(np.bincount(prompt, weight * (full - offset[model])) / total, total)
        held = out[prompt]
        offset = shrunk_means(full - held, model, weight)
        self.offsets_ = {str(name): float(o) for name, o in zip(models, offset, strict=True)}
        self.other_ = float(offset.mean())
        held = held + self._habits(words, names, prompt, full - held - offset[model])
        self._spread(features[prompt], y, full, held, offset[model], samples.censored, weight, model)
        mu = held + offset[model]
        self.windows_ = learn_windows(
            samples, mu, self._scale(features[prompt], mu), [words[i] for i in prompt], features[prompt],
            prompt=prompt, weight=weight, endings=self._endings, window_tokens=self.window_tokens,
            most=self.most_windows, seed=self.seed,
        )  # fmt: skip
        self.most_tokens_ = _OUT_OF_RANGE * float(samples.output_tokens.max())
        self.seen_ = np.unique(_digests([str(text) for text in prompts]))
        self.facts_ = {**samples.metadata, "samples": len(y), "prompts": len(prompts), "models": sorted(self.offsets_)}
        return self

    def predict(self, prompts: Prompts, tokens_so_far: int | Ints = 0) -> LengthDistribution:
        """Distributions of whole lengths above ``tokens_so_far``; prompts without a text count as empty."""
        location: Location = fitted(self, "location_")
        n = len(prompts)
        texts = prompts.text if prompts.text is not None else [""] * n
        features, words = prompt_features(texts)
        offset, known = self._offsets(prompts.model, n)
        vectors = self._vectors(texts) if location.direction is not None else None
        mu = location(features, words, vectors) + offset + self._habit(words, prompts.model)
        scale = self._scale(features, mu)
        z = self.z_.take(np.where(known, 0, 1), axis=0)
        tokens = np.exp(np.minimum(mu[:, None] + scale[:, None] * z, 25.0))
        tokens = np.minimum(tokens, self.most_tokens_)
        if not (tokens_so_far if isinstance(tokens_so_far, int) else np.any(tokens_so_far)):
            return LengthDistribution.of(tokens, LEVELS)
        so_far = np.broadcast_to(np.asarray(tokens_so_far, np.int64), (n,))
        late = np.flatnonzero(so_far > 0)
        if len(late):
            text = prompts.output_so_far
            tokens = tokens.copy()
            tokens[late] = self.windows_.total(
                so_far[late],
                [text[int(i)] for i in late] if text is not None else None,
                mu[late], scale[late], [words[i] for i in late], features[late], self._endings,
            )  # fmt: skip
        return LengthDistribution.of(tokens, LEVELS)

    def knows(self, texts: Sequence[str]) -> npt.NDArray[np.bool_]:
        """[n] whether a prompt is one that was learnt from (by a hash: one in a million is taken for one)."""
        return np.isin(_digests([text.strip() for text in texts]), fitted(self, "seen_"))

    def knows_model(self, name: str) -> bool:
        """Whether outputs of this model were learnt from."""
        return model_key(name) in fitted(self, "offsets_")

    def _vectors(self, texts: Sequence[str]) -> Vectors | None:  # noqa: ARG002 - the encoder reads them
        """[n, v] what prompts mean, for who reads for sense; None here."""
        return None

    def _endings(self, texts: Sequence[str]) -> Vectors | None:  # noqa: ARG002 - the encoder reads them
        """[n, v] what the last words of outputs so far mean, for who reads for sense; None here."""
        return None

    def _offsets(self, models: Sequence[str] | None, n: int) -> tuple[Floats, npt.NDArray[np.bool_]]:
        found: list[float | None] = [None] * n
        if models is not None:
            found = [self.offsets_.get(model_key(name)) for name in models]
        elif len(self.offsets_) == 1:
            found = [next(iter(self.offsets_.values()))] * n
        return (
            np.array([self.other_ if o is None else o for o in found]),
            np.array([o is not None for o in found], bool),
        )

    def _habits(self, words: list[list[str]], names: list[str], prompt: Ints, residual: Floats) -> Floats:
        """[n] what templates add, once their own residuals, a model's own where it has some, are learnt."""
        self.templates_ = templates(words)
        of = np.array([template_of(read, self.templates_) for read in words])[prompt]
        keys = [(f"{t}", f"{t}/{name}") if t >= 0 else ("", "") for t, name in zip(of, names, strict=True)]
        self.habits_: dict[str, float] = {}
        added = np.zeros(len(residual))
        for level in (0, 1):
            group = np.array([key[level] for key in keys], object)
            for key in sorted(set(group) - {""}):
                rows = np.flatnonzero(group == key)
                self.habits_[key] = float((residual[rows] - added[rows]).sum() / (len(rows) + SHRINK))
                added[rows] += self.habits_[key]
        return added

    def _habit(self, words: Sequence[list[str]], models: Sequence[str] | None) -> Floats:
        if not self.templates_:
            return np.zeros(len(words))
        of = [template_of(read, self.templates_) for read in words]
        names = [model_key(m) for m in models] if models is not None else [OTHER] * len(of)
        known = self.habits_.get
        return np.array([known(f"{t}", 0.0) + known(f"{t}/{m}", 0.0) for t, m in zip(of, names, strict=True)])

    def _scale(self, features: Floats, mu: Floats) -> Floats:
        x = np.empty((len(features), features.shape[1] + 1))
        x[:, :-1], x[:, -1] = features, mu
        log = np.minimum(np.maximum(self.scale_.predict(x), -8), 2)
        return np.asarray(np.maximum(np.exp(log), _LEAST_SCALE))

    def _spread(
        self, features: Floats, y: Floats, full: Floats, validation: Floats, offset: Floats,
        censored: npt.NDArray[np.bool_], weight: Floats, model: Ints,
    ) -> None:  # fmt: skip
        """Learns the scale, and the quantiles of residuals over it: of models seen, and of others."""
        mu = validation + offset
        size = np.log(np.maximum(np.abs(full - mu), _LEAST_SCALE))
        rows = np.random.default_rng(self.seed).permutation(len(y))[: self.most_windows]
        x = np.column_stack([features, mu])
        self.scale_ = grow(x[rows], size[rows], np.ones(len(rows)), trees=60, depth=3, seed=self.seed)
        scale = self._scale(features, mu)
        same = residual_quantiles((y - mu) / scale, censored, np.ones(len(y)), LEVELS)
        even = weight / np.bincount(model, weight)[model]
        other = residual_quantiles((y - validation - self.other_) / scale, censored, even, LEVELS)
        seen = np.asarray(np.bincount(model, weight * offset) / np.bincount(model, weight))
        had = float(np.mean((seen - self.other_) ** 2))
        expected = (_MODELS * _MODELS_SD**2 + len(seen) * had) / (_MODELS + max(0, len(seen) - 1))
        within = float(np.average((full - mu) ** 2, weights=even))
        wider = np.sqrt(1 + max(0.0, expected - had) / max(within + had, _LEAST_SCALE**2))
        self.z_ = np.stack([same, other[_MEDIAN] + wider * (other - other[_MEDIAN])])

    def state(self) -> State:
        """What is saved."""
        fitted(self, "location_")
        return packed(self)

    @classmethod
    def from_state(cls, meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Self:
        """The predictor that was saved."""
        made = cls(int(meta["seed"]), int(meta["window_tokens"]), int(meta["most_windows"]))
        made._unpack(meta, arrays)
        return made

    def _unpack(self, meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        unpack(self, meta, arrays)


def model_key(name: str) -> str:
    """A model's name without its organisation and in lower case."""
    return str(name).rsplit("/", 1)[-1].strip().lower()


def _digests(texts: Sequence[str]) -> npt.NDArray[np.uint32]:
    return np.array([zlib.crc32(text.encode("utf-8", "replace")) for text in texts], np.uint32)
