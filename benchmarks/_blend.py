"""A predictor for unseen prompts and models: the mean of several predictions, each on its own scale.

Predictors that learn from different sets err differently: two lexical ones (the shipped one, and one that learns from
all commercially usable data), and ridge regressions on sentence vectors, one per set.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Self

import _texts
import numpy as np
import numpy.typing as npt

from lengthwise import predict
from lengthwise.predict import LengthDistribution, Prompts, Samples
from lengthwise.predict.distribution import LEVELS
from lengthwise.predict.encoder import SentenceEncoder, encoder_folder
from lengthwise.predict.features import prompt_features
from lengthwise.predict.lexical import Lexical
from lengthwise.schema.errors import InputError

Floats = npt.NDArray[np.float64]
LAYERS, HEAD_TOKENS, TAIL_TOKENS = 5, 80, 40
DECAY = 2000.0
_CLIP = 4.0
_ROUNDS = 5


class Sentences:
    """Ridge regression of a prompt's log length on its sentence vector and its lexical columns."""

    def fit(self, samples: Samples) -> Self:
        """Learn the lengths of prompts, corrected for the models' own lengths."""
        from sklearn.linear_model import Ridge

        prompts, prompt = np.unique([text.strip() for text in samples.prompts.text], return_inverse=True)
        _, model = np.unique(samples.prompts.model, return_inverse=True)
        y, wanted = np.log(samples.output_tokens.astype(float)), np.zeros(len(prompts))
        for _ in range(_ROUNDS):
            offset = np.bincount(model, y - wanted[prompt]) / np.bincount(model)
            wanted = np.bincount(prompt, y - offset[model]) / np.bincount(prompt)
        columns = _columns([str(text) for text in prompts])
        self.mean_, self.sd_ = columns.mean(axis=0), columns.std(axis=0) + 1e-6
        self.ridge_ = Ridge(alpha=DECAY).fit(self._standard(columns), wanted)
        return self

    def log_tokens(self, prompts: Prompts) -> Floats:
        """Return [n] log lengths, on the scale of the set."""
        return np.asarray(self.ridge_.predict(self._standard(_columns(list(prompts.text)))))

    def _standard(self, columns: Floats) -> Floats:
        return np.clip((columns - self.mean_) / self.sd_, -_CLIP, _CLIP)


class Blend:
    """The mean of predictions, each in units of its own spread; the distribution is that of the lexical ones.

    Args:
        lexical: Fitted predictors that read output so far as well.
        sentences: Fitted ones that read the prompt alone.
    """

    def __init__(self, lexical: list[Any], sentences: list[Sentences]) -> None:
        self.lexical, self.sentences = lexical, sentences

    def fit(self, samples: Samples) -> Self:
        """Learn the scale of every prediction; only the prompts of the samples count."""
        said = self._predictions(samples.prompts)
        self.mean_, self.sd_ = said.mean(axis=1, keepdims=True), said.std(axis=1, keepdims=True)
        return self

    def predict(self, prompts: Prompts, tokens_so_far: Any = 0) -> LengthDistribution:
        """Return distributions of total lengths above ``tokens_so_far``."""
        so_far = np.broadcast_to(np.asarray(tokens_so_far, float), (len(prompts),))
        count, standard = len(self.lexical), (self._predictions(prompts) - self.mean_) / self.sd_
        # on the lexical predictors' scale: the difference of the mean of all from theirs
        added = (standard.mean(axis=0) - standard[:count].mean(axis=0)) * self.sd_[:count].mean()
        logs = []
        for one in self.lexical:
            total = one.predict(prompts, so_far.astype(np.int64)).given(so_far).at(LEVELS).tokens
            logs.append(np.log(np.maximum(total - so_far[:, None], 1.0)))
        return LengthDistribution.of(so_far[:, None] + np.exp(np.mean(logs, axis=0) + added[:, None]))

    def _predictions(self, prompts: Prompts) -> Floats:
        """Return [predictors, n] log lengths before the first token."""
        first = [np.log(one.predict(prompts).median) for one in self.lexical]
        return np.stack([*first, *(one.log_tokens(prompts) for one in self.sentences)])


@cache
def _encoder() -> SentenceEncoder:
    return SentenceEncoder(layers=LAYERS, remembered=4096)


def _columns(texts: list[str]) -> Floats:
    """Return [n, columns] of prompts; each text is read once."""
    own, at = np.unique(texts, return_inverse=True)
    read = [str(text) for text in own]
    return np.hstack([prompt_features(read)[0], _encoder().embed(read, HEAD_TOKENS, TAIL_TOKENS)])[at]


@cache
def trained(text: Path) -> Blend:
    """Return the blend of ELIS' evaluation, trained without AlpacaEval; without an encoder the lexical ones alone."""
    known = _texts.alpaca_eval(text).prompts.text
    lexical = [predict.default(), Lexical().fit(_texts.wide(text))]
    sets = []
    if has_encoder():
        sets = [_texts.oasst(text), _texts.instructions(text, "llamafactory_demo", "alpaca_en_demo")]
    sentences = [Sentences().fit(_texts.without(samples, known)) for samples in sets]
    return Blend(lexical, sentences).fit(_texts.without(_texts.arena_hard(text), known))


def has_encoder() -> bool:
    """Return whether a sentence encoder is installed."""
    try:
        encoder_folder()
    except InputError:
        return False
    return True


def description() -> str:
    """Return the parts of the blend and their training data."""
    ridge = "ridge on sentence vectors (OASST multi-sample; alpaca_en_demo)" if has_encoder() else "no sentence encoder"
    return (
        "blend of: the shipped predictor (outputs of Open-Assistant's openly licensed models); Lexical on OASST, "
        f"Arena-Hard, ZeroEval, GPTeacher, alpaca_en_demo; {ridge}; scaled on Arena-Hard prompts; AlpacaEval unseen"
    )
