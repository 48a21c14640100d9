"""Lengths by what a prompt, and the output so far, mean to a sentence encoder: a few milliseconds a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from lengthwise.predict._lexical_fit import imputed, residual_quantiles
from lengthwise.predict._state import State, array, fitted
from lengthwise.predict.contract import Ints, Prompts, Samples
from lengthwise.predict.distribution import LEVELS, Floats, LengthDistribution
from lengthwise.predict.encoder_head import Head, learn_head
from lengthwise.predict.encoder_text import SentenceEncoder
from lengthwise.predict.encoder_windows import Left, learn_left
from lengthwise.predict.features import NAMES, asked_items, prompt_features
from lengthwise.schema.errors import InputError

_OTHER = ""
_FOLDS, _ROUNDS, _SHRINK = 4, 2, 5.0
_LEAST_SCALE, _WIDER, _BEYOND = 0.05, 1.15, 4.0


class Encoder:
    """Length = its model's typical length x what the prompt calls for x a spread of its own.

    The prompt is read by a frozen sentence encoder (its vector: the means of two middle layers over the
    first and last tokens) and by the lexical features; small networks on both tell its log length
    relative to the model's, and how far that may be off. Once tokens have come, networks on the first
    answer, on marks of the text so far and on the vector of its last tokens tell what is left, as ELIS
    re-predicts after each window of 50 tokens (Choi et al. 2025). Where no text so far is given, survival
    alone tells it. Cut outputs count as longer than seen, as for ``Lexical``.

    Args:
        folder: Of the encoder; None takes the installed one (``encoder_text.encoder_folder``).
        layers: Layers of it that are run.
        head_tokens: Tokens read at the beginning of a prompt.
        tail_tokens: Tokens read at its end.
        output_tokens: Tokens read at the end of the text so far.
        window_tokens: Tokens between two looks at an output.
        most_windows: Windows learnt from, drawn from all.
        seed: Of folds, draws and networks.
    """

    kind: ClassVar[str] = "encoder"

    def __init__(
        self,
        folder: Path | str | None = None,
        layers: int = 4,
        head_tokens: int = 20,
        tail_tokens: int = 10,
        output_tokens: int = 24,
        window_tokens: int = 50,
        most_windows: int = 15_000,
        seed: int = 0,
    ) -> None:
        for name, value in (
            ("layers", layers),
            ("head_tokens", head_tokens),
            ("tail_tokens", tail_tokens),
            ("output_tokens", output_tokens),
            ("window_tokens", window_tokens),
            ("most_windows", most_windows),
        ):
            if value < 1:
                raise InputError(f"{name} must be at least 1; it is {value}")
        self.folder, self.layers, self.head_tokens, self.tail_tokens = (
            folder,
            layers,
            head_tokens,
            tail_tokens,
        )
        self.output_tokens, self.window_tokens = output_tokens, window_tokens
        self.most_windows, self.seed = most_windows, seed
        self.fingerprint_: str | None = None

    @cached_property
    def encoder(self) -> SentenceEncoder:
        """The sentence encoder; the one that was learnt on, or it is an InputError."""
        made = SentenceEncoder(self.folder, self.layers)
        learnt = self.fingerprint_
        if learnt is not None and made.fingerprint != learnt:
            raise InputError(
                f"this predictor learnt on an encoder whose weights have SHA-256 {learnt[:12]}...; the one in "
                f"{made.folder} has {made.fingerprint[:12]}...; give its folder, or train again"
            )
        return made

    def fit(self, samples: Samples) -> Self:
        """Learns from samples that have texts of prompts; with texts of outputs, from windows of these too.

        Raises:
            InputError: There are no texts, or every output was cut, or no encoder is found.
            MissingExtraError: The extra ``predict`` is not installed.
        """
        if samples.prompts.text is None:
            raise InputError("the encoder predictor learns from texts of prompts; these samples have none")
        if samples.censored.all():
            raise InputError("every output was cut at a limit; some must have ended by themselves")
        self.fingerprint_ = None
        self.fingerprint_ = self.encoder.fingerprint
        prompts, prompt = np.unique([str(text).strip() for text in samples.prompts.text], return_inverse=True)
        names = [_key(name) for name in samples.prompts.model or [_OTHER] * len(samples)]
        models, model = np.unique(names, return_inverse=True)
        weight = _root_shares(prompt) * _root_shares(model)
        x, asked = self._read([str(text) for text in prompts])
        held = self._locate(x, prompt, model, weight, samples)
        self.offsets_ = {str(name): float(o) for name, o in zip(models, self._offset, strict=True)}
        self.other_ = float(self._offset.mean())
        mu = held + self._offset[model]
        scale = self._spread(x[prompt], mu, model, samples, weight)
        prior = LengthDistribution.of(self._tokens(mu, scale, np.ones(len(mu), bool)), LEVELS)
        self.left_ = learn_left(
            samples, prior, [asked[p] for p in prompt], weight, self._tail,
            window_tokens=self.window_tokens, most=self.most_windows, seed=self.seed,
        )  # fmt: skip
        self.facts_ = {
            **samples.facts,
            "samples": len(mu),
            "prompts": len(prompts),
            "models": sorted(self.offsets_),
            "encoder_sha256": self.fingerprint_,
        }
        return self

    def predict(self, prompts: Prompts, tokens_so_far: int | Ints = 0) -> LengthDistribution:
        """Distributions of whole lengths above ``tokens_so_far``; prompts without a text count as empty."""
        location: Head = fitted(self, "location_")
        n = len(prompts)
        x, asked = self._read([str(text) for text in prompts.text] if prompts.text is not None else [""] * n)
        offset, known = self._offsets(prompts.model, n)
        mu = location(x) + offset
        first = LengthDistribution.of(self._tokens(mu, self._scale(x, mu), known), LEVELS)
        so_far = np.broadcast_to(np.asarray(tokens_so_far, np.int64), (n,))
        if not (so_far > 0).any():
            return first
        tokens = first.given(so_far).tokens.copy()
        text = prompts.output_so_far
        read = np.flatnonzero((so_far > 0) & np.array([bool(t) for t in text or [""] * n], bool))
        if len(read) and text is not None and self.left_ is not None:
            texts = [text[int(i)] for i in read]
            total = self.left_.total(
                so_far[read], texts, self._tail(texts), first.take(read), [asked[i] for i in read]
            )
            most = np.maximum(self.most_tokens_, 2.0 * so_far[read])
            tokens[read] = np.minimum(total, most[:, None])
        return LengthDistribution.of(tokens, LEVELS)

    def _read(self, texts: Sequence[str]) -> tuple[npt.NDArray[Any], list[int]]:
        """[n, columns] the vectors and features of prompts, and the items that each asks for."""
        features, words = prompt_features(texts)
        vectors = self.encoder.embed(texts, self.head_tokens, self.tail_tokens)
        return np.hstack([features, vectors]), [asked_items(read) for read in words]

    def _tail(self, texts: Sequence[str]) -> npt.NDArray[Any]:
        return self.encoder.embed(texts, 0, self.output_tokens)

    def _locate(
        self, x: npt.NDArray[Any], prompt: Ints, model: Ints, weight: Floats, samples: Samples
    ) -> Floats:
        """Learns offsets of models and the location of prompts; [n] the location of prompts left out."""
        y = np.log(samples.output_tokens.astype(float))
        fold = np.random.default_rng(self.seed).permutation(len(x)) % max(2, min(_FOLDS, len(x)))
        total = np.asarray(np.bincount(prompt, weight), float)
        held, offset = np.zeros(len(x)), _shrunk(y, model, weight)
        for _ in range(_ROUNDS):
            full = imputed(y, samples.censored, held[prompt] + offset[model])
            offset = _shrunk(full - held[prompt], model, weight)
            target = np.bincount(prompt, weight * (full - offset[model])) / total
            for k in range(int(fold.max()) + 1 if len(x) > 1 else 0):
                own = fold != k
                held[~own] = learn_head(x[own], target[own], total[own], self.seed)(x[~own])
        self.location_ = learn_head(x, target, total, self.seed)
        self._offset = _shrunk(full - held[prompt], model, weight)
        self._full = full
        self.most_tokens_ = _BEYOND * float(samples.output_tokens.max())
        return np.asarray(held[prompt])

    def _spread(
        self, x: npt.NDArray[Any], mu: Floats, model: Ints, samples: Samples, weight: Floats
    ) -> Floats:
        """Learns the scale and the quantiles of residuals; [n] the scale."""
        rows = np.random.default_rng(self.seed).permutation(len(mu))[: self.most_windows]
        size = np.log(np.maximum(np.abs(self._full - mu), _LEAST_SCALE))
        columns = np.column_stack([x[:, : len(NAMES)], mu])
        self.scale_ = learn_head(columns[rows], size[rows], weight[rows], self.seed)
        scale = self._scale(x, mu)
        y = np.log(samples.output_tokens.astype(float))
        same = residual_quantiles((y - mu) / scale, samples.censored, weight, LEVELS)
        other = _WIDER * same
        if int(model.max()) >= 2:
            even = weight / np.bincount(model, weight)[model]
            away = mu - self._offset[model] + self.other_
            other = residual_quantiles((y - away) / scale, samples.censored, even, LEVELS)
        self.z_ = np.stack([same, other])
        del self._full
        return scale

    def _scale(self, x: npt.NDArray[Any], mu: Floats) -> Floats:
        scale: Head = self.scale_
        log = scale(np.column_stack([x[:, : len(NAMES)], mu]))
        return np.asarray(np.maximum(np.exp(np.clip(log, -6, 2)), _LEAST_SCALE))

    def _tokens(self, mu: Floats, scale: Floats, known: npt.NDArray[np.bool_]) -> Floats:
        z = np.where(known[:, None], self.z_[0], self.z_[1])
        tokens = np.exp(np.minimum(mu[:, None] + scale[:, None] * z, 25.0))
        return np.asarray(np.minimum(tokens, self.most_tokens_))

    def _offsets(self, models: Sequence[str] | None, n: int) -> tuple[Floats, npt.NDArray[np.bool_]]:
        names: Sequence[str] = [_OTHER] * n if models is None else [_key(name) for name in models]
        if models is None and len(self.offsets_) == 1:
            names = [next(iter(self.offsets_))] * n
        known = np.array([name in self.offsets_ for name in names], bool)
        return np.array([self.offsets_.get(name, self.other_) for name in names], float), known

    def state(self) -> State:
        """What is saved: networks, offsets, quantiles and the encoder's fingerprint, not the encoder."""
        location: Head = fitted(self, "location_")
        names = (
            "layers",
            "head_tokens",
            "tail_tokens",
            "output_tokens",
            "window_tokens",
            "most_windows",
            "seed",
        )
        meta = {
            **{name: getattr(self, name) for name in names},
            "folder": None if self.folder is None else str(self.folder),
            "fingerprint": self.fingerprint_,
            "offsets": self.offsets_,
            "other": self.other_,
            "most_tokens": self.most_tokens_,
            "reads_output": self.left_ is not None,
        }
        arrays = {**location.arrays("location"), **self.scale_.arrays("scale"), "z": self.z_}
        return meta, {**arrays, **(self.left_.arrays() if self.left_ is not None else {})}

    @classmethod
    def from_state(cls, meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Self:
        """The predictor that was saved; the encoder itself is looked for when it first predicts."""
        names = (
            "layers",
            "head_tokens",
            "tail_tokens",
            "output_tokens",
            "window_tokens",
            "most_windows",
            "seed",
        )
        made = cls(meta["folder"], *(int(meta[name]) for name in names))
        made.fingerprint_ = str(meta["fingerprint"])
        made.offsets_ = {str(name): float(o) for name, o in meta["offsets"].items()}
        made.other_, made.most_tokens_ = float(meta["other"]), float(meta["most_tokens"])
        columns = array(arrays, "location.middle", 1).shape[0]
        made.location_ = Head.of_arrays(arrays, "location", columns)
        made.scale_ = Head.of_arrays(arrays, "scale", len(NAMES) + 1)
        made.z_ = array(arrays, "z", 2).reshape(2, len(LEVELS))
        vector = columns - len(NAMES)
        made.left_ = Left.of_arrays(arrays, vector) if meta["reads_output"] else None
        return made


def _key(name: str) -> str:
    """A model's name without its organisation and in lower case."""
    return str(name).rsplit("/", 1)[-1].strip().lower()


def _root_shares(groups: Ints) -> Floats:
    """[n] weights that let a group of n samples count as the root of n."""
    return np.asarray(1 / np.sqrt(np.bincount(groups)[groups]))


def _shrunk(values: Floats, group: Ints, weight: Floats) -> Floats:
    """[groups] means, drawn to that of all groups where samples are few."""
    means, count = np.bincount(group, weight * values) / np.bincount(group, weight), np.bincount(group)
    return np.asarray((count * means + _SHRINK * means.mean()) / (count + _SHRINK))
