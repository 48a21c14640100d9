"""A length predictor by a prompt's words and gradient-boosted trees: under 0.1 ms per prompt in batches of 32."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from lengthwise.predict import lexical_model
from lengthwise.predict.contract import Ints, Prompts, Samples, rows_reading_output
from lengthwise.predict.distribution import LEVELS, Floats, LengthDistribution
from lengthwise.predict.features import NAMES, PROGRESS, prompt_features
from lengthwise.predict.regressors import Head, Trees, fit_trees
from lengthwise.predict.serialization import Arrays, State, array, fitted
from lengthwise.schema.errors import InputError

LAYOUT = 2  # version of the features; trees trained on other columns are meaningless
SHRINK = 5.0
"""Number of samples at which a group's own mean has half the weight, and the mean of all groups the other half."""
UNKNOWN_MODEL = ""  # name of the model where samples or prompts name none

_REPEATS = 4.0
_TEMPLATE_WORDS, _MIN_TEMPLATE_PROMPTS = 4, 40
_OFFSET_ROUNDS = 2
_MIN_SCALE = 0.02
_PRIOR_MODELS, _PRIOR_MODEL_SD = 3.0, 0.35
"""Prior on unseen models: it counts as this many models, whose offsets have this standard deviation."""
_MAX_LENGTH_FACTOR = 4.0
_MEDIAN = int(np.searchsorted(LEVELS, 0.5))


def repeat_weights(groups: Ints) -> Floats:
    """Return sample weights [n] that limit a prompt's total weight to ``_REPEATS``: repeats add little information."""
    return np.asarray(1 / (1 + (np.bincount(groups)[groups] - 1) / _REPEATS))


def template_weights(words: Sequence[list[str]]) -> Floats:
    """Return weights of prompts, [n]: k prompts with equal first or last four words have the total weight sqrt(k)."""
    ends = [_template_ends(read) for read in words]
    counts = Counter(end for pair in ends for end in pair)
    return np.asarray([1 / np.sqrt(max(counts[end] for end in pair)) for pair in ends])


def _template_ends(words: list[str]) -> tuple[str, str]:
    return "^" + " ".join(words[:_TEMPLATE_WORDS]), " ".join(words[-_TEMPLATE_WORDS:]) + "$"


def _group_means(y: Floats, group: Ints, weight: Floats) -> Floats:
    return np.asarray(np.bincount(group, weight * y) / np.bincount(group, weight))


def _shrunk_means(residual: Floats, group: Ints, weight: Floats) -> Floats:
    """Return the mean residual of each group, [groups]; with few samples, it is close to that of all groups."""
    means, count = _group_means(residual, group, weight), np.bincount(group)
    return np.asarray((count * means + SHRINK * means.mean()) / (count + SHRINK))


class Lexical:
    """Predicts a product of factors: the model's typical length, the effects of the prompt, and a random residual.

    In log tokens, the parts are:

    - an offset for each model; unknown models share one offset, and have a wider spread;
    - a location from the prompt: the weighted mean of a ridge regression on words and word pairs and of boosted trees
      on counts, punctuation and prior estimates; cross-validation over prompts chooses the weight;
    - an offset for each template (four first or last words that at least 40 prompts share), and by template and model;
    - a scale by boosted trees, and the quantiles of the residuals of held-out prompts divided by this scale.

    Censored outputs count as longer than observed: the location uses the mean of the longer residuals (Buckley and
    James 1979), the quantiles use the Kaplan-Meier estimate. Models and templates count by the square root of their
    number of samples, and repeated prompts count little, so that many similar samples do not outweigh the others.

    After some tokens, the prediction is the first one conditioned on the tokens so far (``LengthDistribution.given``).
    If the text so far is known, a model of the remaining length (``lexical_model.WindowModel``) predicts instead, at
    the tokens so far where held-out prompts show that it is better than conditioning (``held_out_``). It learns from at
    most ``max_windows`` beginnings of outputs, each a multiple of ``window_tokens`` tokens long, drawn at random.
    """

    kind: ClassVar[str] = "lexical"
    reads_text: ClassVar[bool] = True

    def __init__(self, seed: int = 0, window_tokens: int = 50, max_windows: int = 20_000) -> None:
        if window_tokens < 1 or max_windows < 1:
            raise InputError(f"window_tokens and max_windows must be at least 1; got {window_tokens}, {max_windows}")
        self.seed, self.window_tokens, self.max_windows = seed, window_tokens, max_windows

    def fit(self, samples: Samples) -> Self:
        """Learn from samples with texts of prompts; this needs scikit-learn (extra ``predict``).

        Raises InputError if there are no texts, or every output was cut off.
        """
        texts = samples.prompts.text
        if texts is None:
            raise InputError("the lexical predictor learns from texts of prompts; these samples have none")
        if samples.censored.all():
            raise InputError("every output was cut off at a limit; some outputs must be complete")
        distinct, prompt = np.unique([text.strip() for text in texts], return_inverse=True)
        prompts = [str(text) for text in distinct]
        features, words = prompt_features(prompts)
        names = [model_key(name) for name in samples.prompts.model or [UNKNOWN_MODEL] * len(samples)]
        models, model = np.unique(names, return_inverse=True)
        weight = repeat_weights(prompt) * (1 / np.sqrt(np.bincount(model)[model])) * template_weights(words)[prompt]
        total = np.asarray(np.bincount(prompt, weight), float)
        y = np.log(samples.output_tokens.astype(float))
        design = lexical_model.Design(features, words, self.seed, self._prompt_vectors(prompts))

        def per_prompt(values: Floats) -> Floats:
            return np.asarray(np.bincount(prompt, weight * values) / total)

        location, offset = np.zeros(len(y)), _group_means(y, model, weight)
        for _ in range(_OFFSET_ROUNDS):
            full = lexical_model.imputed(y, samples.censored, location + offset[model])
            offset = _shrunk_means(full - location, model, weight)
            location = design.cross_validated_ridge(per_prompt(full - offset[model]), total)[prompt]
        full = lexical_model.imputed(y, samples.censored, location + offset[model])
        self.location_, held_out = design.fit(per_prompt(full - offset[model]), total)
        location = held_out[prompt]
        offset = _shrunk_means(full - location, model, weight)
        self.offsets_ = {str(name): float(o) for name, o in zip(models, offset, strict=True)}
        self.other_ = float(offset.mean())
        location = location + self._fit_templates(words, names, prompt, full - location - offset[model])
        self._fit_spread(features[prompt], y, full, location, offset[model], samples.censored, weight, model)
        self.max_tokens_ = _MAX_LENGTH_FACTOR * float(samples.output_tokens.max())
        mu = location + offset[model]
        scale, own = self._scale(features[prompt], mu), [words[i] for i in prompt]
        predicted = self._before_first_token(mu, scale, np.ones(len(mu), bool))
        self.windows_, self.held_out_ = lexical_model.fit_windows(
            samples,
            lexical_model.BasePredictions(mu, scale, own, features[prompt], prompt, weight, predicted),
            output_vectors=self._output_vectors,
            window_tokens=self.window_tokens,
            max_windows=self.max_windows,
            seed=self.seed,
        )
        self.seen_ = np.unique(_digests(prompts))
        counts = {"samples": len(y), "prompts": len(prompts)}
        self.metadata_ = {**samples.metadata, **counts, "models": sorted(self.offsets_)}
        return self

    def predict(self, prompts: Prompts, tokens_so_far: int | Ints = 0) -> LengthDistribution:
        """Return distributions of the total lengths above ``tokens_so_far``. A prompt without text counts as empty."""
        location: lexical_model.Location = fitted(self, "location_")
        n = len(prompts)
        texts = prompts.text if prompts.text is not None else [""] * n
        features, words = prompt_features(texts)
        offset, is_known = self._offsets(prompts.model, n)
        vectors = self._prompt_vectors(texts) if location.networks is not None else None
        mu = location(features, words, vectors) + offset + self._template_offsets(words, prompts.model)
        scale = self._scale(features, mu)
        predicted = self._before_first_token(mu, scale, is_known)
        if isinstance(tokens_so_far, int) and tokens_so_far == 0:
            return predicted
        so_far = np.broadcast_to(np.asarray(tokens_so_far, np.int64), (n,))
        predicted, output = predicted.given(so_far), prompts.output_so_far
        rows = rows_reading_output(self, prompts, so_far)
        if self.windows_ is None or output is None or not len(rows):
            return predicted
        tokens = predicted.tokens.copy()
        tokens[rows] = self.windows_.total(
            so_far[rows], [output[int(i)] for i in rows],
            mu[rows], scale[rows], [words[i] for i in rows], features[rows], self._output_vectors,
        )  # fmt: skip
        return LengthDistribution.of(tokens, LEVELS)

    @property
    def reads_output(self) -> tuple[int, int] | None:
        """Return the first and last tokens so far at which the predictor reads the output so far; None: never."""
        return lexical_model.reading_range(self.held_out_)

    def _before_first_token(self, mu: Floats, scale: Floats, is_known: npt.NDArray[np.bool_]) -> LengthDistribution:
        z = self.z_.take(np.where(is_known, 0, 1), axis=0)
        tokens = np.exp(np.minimum(mu[:, None] + scale[:, None] * z, 25.0))
        return LengthDistribution.of(np.minimum(tokens, self.max_tokens_), LEVELS)

    def knows(self, texts: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Return whether the training data had each prompt, [n], by 32-bit checksums, which rarely collide."""
        return np.isin(_digests([text.strip() for text in texts]), fitted(self, "seen_"))

    def knows_model(self, name: str) -> bool:
        """Return whether the training data had outputs of this model."""
        return model_key(name) in fitted(self, "offsets_")

    def _prompt_vectors(self, texts: Sequence[str]) -> lexical_model.Vectors | None:  # noqa: ARG002 - for Encoder
        return None

    def _output_vectors(self, texts: Sequence[str]) -> lexical_model.Vectors | None:  # noqa: ARG002 - for Encoder
        return None

    def _offsets(self, models: Sequence[str] | None, n: int) -> tuple[Floats, npt.NDArray[np.bool_]]:
        found = np.full(n, np.nan)
        if models is not None:
            found = np.array([self.offsets_.get(model_key(name), np.nan) for name in models], float)
        elif len(self.offsets_) == 1:
            found = np.full(n, next(iter(self.offsets_.values())))
        return np.where(np.isnan(found), self.other_, found), ~np.isnan(found)

    def _template_of(self, words: list[str]) -> int:
        if not self.templates_:
            return -1
        first, last = _template_ends(words)
        return self.templates_.get(last, self.templates_.get(first, -1))

    def _fit_templates(self, words: list[list[str]], names: list[str], prompt: Ints, residual: Floats) -> Floats:
        """Learn an offset for each template, and for each model within it; return each sample's sum, [n]."""
        counts = Counter(end for read in words for end in _template_ends(read))
        common = sorted(end for end, n in counts.items() if n >= _MIN_TEMPLATE_PROMPTS)
        self.templates_ = {end: number for number, end in enumerate(common)}
        templates = np.array([self._template_of(read) for read in words])[prompt]
        keys = [(f"{t}", f"{t}/{name}") if t >= 0 else ("", "") for t, name in zip(templates, names, strict=True)]
        self.template_offsets_: dict[str, float] = {}
        added = np.zeros(len(residual))
        for level in (0, 1):
            group = np.array([key[level] for key in keys], object)
            for key in sorted(set(group) - {""}):
                rows = np.flatnonzero(group == key)
                self.template_offsets_[key] = float((residual[rows] - added[rows]).sum() / (len(rows) + SHRINK))
                added[rows] += self.template_offsets_[key]
        return added

    def _template_offsets(self, words: Sequence[list[str]], models: Sequence[str] | None) -> Floats:
        if not self.templates_:
            return np.zeros(len(words))
        templates = [self._template_of(read) for read in words]
        names = [model_key(m) for m in models] if models is not None else [UNKNOWN_MODEL] * len(templates)
        known = self.template_offsets_.get
        return np.array([known(f"{t}", 0.0) + known(f"{t}/{m}", 0.0) for t, m in zip(templates, names, strict=True)])

    def _scale(self, features: Floats, mu: Floats) -> Floats:
        x = np.empty((len(features), features.shape[1] + 1))
        x[:, :-1], x[:, -1] = features, mu
        log = np.minimum(np.maximum(self.scale_.predict(x), -8), 2)
        return np.asarray(np.maximum(np.exp(log), _MIN_SCALE))

    def _fit_spread(
        self, features: Floats, y: Floats, full: Floats, location: Floats, offset: Floats,
        censored: npt.NDArray[np.bool_], weight: Floats, model: Ints,
    ) -> None:  # fmt: skip
        """Learn the scale, and the quantiles of residuals divided by it, for known and for unknown models."""
        mu = location + offset
        log_size = np.log(np.maximum(np.abs(full - mu), _MIN_SCALE))
        rows = np.random.default_rng(self.seed).permutation(len(y))[: self.max_windows]
        x = np.column_stack([features, mu])
        self.scale_ = fit_trees(x[rows], log_size[rows], np.ones(len(rows)), trees=60, depth=3, seed=self.seed)
        scale = self._scale(features, mu)
        known = lexical_model.residual_quantiles((y - mu) / scale, censored, np.ones(len(y)), LEVELS)
        uniform = weight / np.bincount(model, weight)[model]  # every model counts the same
        other = lexical_model.residual_quantiles((y - location - self.other_) / scale, censored, uniform, LEVELS)
        offsets = _group_means(offset, model, weight)
        variance = float(np.mean((offsets - self.other_) ** 2))
        expected = (_PRIOR_MODELS * _PRIOR_MODEL_SD**2 + len(offsets) * variance) / (
            _PRIOR_MODELS + max(0, len(offsets) - 1)
        )
        within = float(np.average((full - mu) ** 2, weights=uniform))
        wider = np.sqrt(1 + max(0.0, expected - variance) / max(within + variance, _MIN_SCALE**2))
        self.z_ = np.stack([known, other[_MEDIAN] + wider * (other - other[_MEDIAN])])

    def state(self) -> State:
        """Return the state to save, without the terms that have no effect on predictions."""
        location: lexical_model.Location = fitted(self, "location_")
        weights = {term: weight for term, weight in location.weights.items() if weight and location.share}
        meta = {
            "layout": [LAYOUT, len(NAMES), len(PROGRESS)],
            "seed": self.seed,
            "window_tokens": self.window_tokens,
            "max_windows": self.max_windows,
            "share": location.share,
            "offsets": self.offsets_,
            "other": self.other_,
            "templates": self.templates_,
            "habits": self.template_offsets_,
            "max_tokens": self.max_tokens_,
            "held_out": [asdict(band) for band in self.held_out_],
        }
        arrays: Arrays = {
            "terms": np.frombuffer("\n".join(weights).encode(), np.uint8),
            "weights": np.array(list(weights.values()), np.float64),
            "linear": location.linear,
            "middle": location.middle,
            "spread": location.spread,
            "seen": self.seen_,
            "z": self.z_,
            **location.trees.to_arrays("location"),
            **self.scale_.to_arrays("scale"),
        }
        if location.networks is not None:
            arrays |= location.networks.to_arrays("sense") | {"sense.share": np.array(location.network_share)}
        if (windows := self.windows_) is not None:
            arrays |= {"windows.z": windows.z, "windows.base_z": windows.base_z}
            arrays |= windows.middle.to_arrays("windows.middle") | windows.scale.to_arrays("windows.scale")
            if windows.axes is not None:
                arrays |= {"axes.middle": windows.axes.middle, "axes.turn": windows.axes.directions}
        return meta, arrays

    @classmethod
    def from_state(cls, meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Self:
        """Return the predictor from the JSON values and the arrays that ``state`` returned."""
        made = cls(int(meta["seed"]), int(meta["window_tokens"]), int(meta["max_windows"]))
        made._restore(meta, arrays)
        return made

    def _restore(self, meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        layout = [LAYOUT, len(NAMES), len(PROGRESS)]
        if list(meta["layout"]) != layout:
            raise InputError(
                f"the model was trained on other features ({meta['layout']}) than this version reads "
                f"({layout}); train it again"
            )
        terms = arrays["terms"].astype(np.uint8).tobytes().decode().split("\n")
        weights = array(arrays, "weights", 1)
        if len(weights) != len([t for t in terms if t]):
            raise InputError(f"each of {len(terms)} terms must have a weight; there are {len(weights)} weights")
        n = len(NAMES)
        linear, middle, spread = (
            _shaped(arrays, name, (size,)) for name, size in (("linear", n + 1), ("middle", n), ("spread", n))
        )
        trees = Trees.from_arrays(arrays, "location", n)
        networks, network_share = None, 0.0
        if "sense.share" in arrays:  # its columns are the features and the encoder's vector
            networks = Head.from_arrays(arrays, "sense", array(arrays, "sense.middle", 1).shape[0])
            network_share = float(array(arrays, "sense.share", 0))
        words = dict(zip(terms, weights.tolist(), strict=False)) if len(weights) else {}
        share = float(meta["share"])
        self.location_ = lexical_model.Location(words, linear, middle, spread, share, trees, networks, network_share)
        self.seen_ = array(arrays, "seen", 1).astype(np.uint32)
        self.scale_ = Trees.from_arrays(arrays, "scale", n + 1)
        self.z_ = _shaped(arrays, "z", (2, len(LEVELS)))
        self.held_out_ = tuple(lexical_model.BandLosses(**band) for band in meta["held_out"])
        self.windows_ = _restored_windows(arrays) if self.reads_output is not None else None
        self.offsets_ = {str(name): float(offset) for name, offset in meta["offsets"].items()}
        self.templates_ = {str(end): int(number) for end, number in meta["templates"].items()}
        self.template_offsets_ = {str(key): float(offset) for key, offset in meta["habits"].items()}
        self.other_, self.max_tokens_ = float(meta["other"]), float(meta["max_tokens"])


def _restored_windows(arrays: Mapping[str, npt.NDArray[Any]]) -> lexical_model.WindowModel:
    axes, columns = None, lexical_model.WINDOW_COLUMNS
    if "axes.turn" in arrays:
        directions = array(arrays, "axes.turn", 2)
        axes = lexical_model.PrincipalAxes(_shaped(arrays, "axes.middle", (len(directions),)), directions)
        columns += directions.shape[1]
    middle, scale = (Trees.from_arrays(arrays, f"windows.{name}", columns) for name in ("middle", "scale"))
    z = _shaped(arrays, "windows.z", (len(lexical_model.BANDS) + 1, len(LEVELS)))
    base_z = _shaped(arrays, "windows.base_z", (len(LEVELS),))
    return lexical_model.WindowModel(middle, scale, z, base_z, axes)


def model_key(name: str) -> str:
    """Return a model's name in lower case, without the organization."""
    return str(name).rsplit("/", 1)[-1].strip().lower()


def _digests(texts: Sequence[str]) -> npt.NDArray[np.uint32]:
    return np.array([zlib.crc32(text.encode("utf-8", "replace")) for text in texts], np.uint32)


def _shaped(arrays: Mapping[str, npt.NDArray[Any]], name: str, shape: tuple[int, ...]) -> Floats:
    found = array(arrays, name, len(shape))
    if found.shape != shape:
        raise InputError(f"{name} must have the shape {shape}; it has {found.shape}")
    return found
