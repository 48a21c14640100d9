"""A predictor for prompts and models that nobody has seen: what several opinions say, each on its own scale.

Opinions that learn from different sets err differently: two lexical predictors (the shipped one, and one that
learns from everything that is not non-commercial), and ridge regressions on sentence vectors, one a set.
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
        """Learns what prompts call for, the models' own lengths taken out."""
        prompts, prompt = np.unique([text.strip() for text in samples.prompts.text], return_inverse=True)
        _, model = np.unique(samples.prompts.model, return_inverse=True)
        y, wanted = np.log(samples.output_tokens.astype(float)), np.zeros(len(prompts))
        for _ in range(_ROUNDS):
            offset = np.bincount(model, y - wanted[prompt]) / np.bincount(model)
            wanted = np.bincount(prompt, y - offset[model]) / np.bincount(prompt)
        from sklearn.linear_model import Ridge

        columns = _columns([str(text) for text in prompts])
        self.mean_, self.sd_ = columns.mean(axis=0), columns.std(axis=0) + 1e-6
        self.ridge_ = Ridge(alpha=DECAY).fit(self._standard(columns), wanted)
        return self

    def log_tokens(self, prompts: Prompts) -> Floats:
        """[n] log lengths, on the scale of the set."""
        return np.asarray(self.ridge_.predict(self._standard(_columns(list(prompts.text)))))

    def _standard(self, columns: Floats) -> Floats:
        return np.clip((columns - self.mean_) / self.sd_, -_CLIP, _CLIP)


class Blend:
    """The mean of opinions, each in units of its own spread; the doubt is the first lexical one's.

    Args:
        lexical: Fitted predictors that read output so far, too.
        sentences: Fitted ones that read the prompt alone.
    """

    def __init__(self, lexical: list[Any], sentences: list[Sentences]) -> None:
        self.lexical, self.sentences = lexical, sentences

    def fit(self, samples: Samples) -> Self:
        """Learns the scale of every opinion; of the samples only the prompts count."""
        said = self._opinions(samples.prompts)
        self.mean_, self.sd_ = said.mean(axis=1, keepdims=True), said.std(axis=1, keepdims=True)
        return self

    def predict(self, prompts: Prompts, tokens_so_far: Any = 0) -> LengthDistribution:
        """Distributions of whole lengths above ``tokens_so_far``."""
        so_far = np.broadcast_to(np.asarray(tokens_so_far, float), (len(prompts),))
        said = self._opinions(prompts)
        count = len(self.lexical)
        standard = (said - self.mean_) / self.sd_
        # on the lexical opinions' scale: by how much the mean of all differs from theirs
        added = (standard.mean(axis=0) - standard[:count].mean(axis=0)) * self.sd_[:count].mean()
        left = np.mean([np.log(_left(one, prompts, so_far)) for one in self.lexical], axis=0)
        return LengthDistribution.of(so_far[:, None] + np.exp(left + added[:, None]))

    def _opinions(self, prompts: Prompts) -> Floats:
        """[opinions, n] log lengths before the first token."""
        first = [np.log(one.predict(prompts).median) for one in self.lexical]
        return np.stack([*first, *(one.log_tokens(prompts) for one in self.sentences)])


def _left(one: Any, prompts: Prompts, so_far: Floats) -> Floats:
    """[n, levels] tokens still to come, at least 1."""
    told = one.predict(prompts, so_far.astype(np.int64)).given(so_far).at(LEVELS)
    return np.asarray(np.maximum(told.tokens - so_far[:, None], 1.0))


@cache
def _encoder() -> SentenceEncoder:
    return SentenceEncoder(layers=LAYERS, remembered=4096)


def _columns(texts: list[str]) -> Floats:
    """[n, columns] of prompts; each text is read once."""
    own, at = np.unique(texts, return_inverse=True)
    read = [str(text) for text in own]
    return np.hstack([prompt_features(read)[0], _encoder().embed(read, HEAD_TOKENS, TAIL_TOKENS)])[at]


@cache
def trained(text: Path) -> Blend:
    """The blend that ELIS' evaluation is asked with; it has seen no prompt and no output of AlpacaEval."""
    known = list(_texts.alpaca_eval(text).prompts.text)
    lexical = [predict.default(), Lexical().fit(_texts.wide(text))]
    sets = (
        [_texts.oasst(text), _texts.instructions(text, "llamafactory_demo", "alpaca_en_demo")] if has_encoder() else []
    )
    sentences = [Sentences().fit(_texts.without(samples, known)) for samples in sets]
    return Blend(lexical, sentences).fit(_texts.without(_texts.arena_hard(text), known))


def has_encoder() -> bool:
    """Whether a sentence encoder is installed; without one the blend is of the lexical opinions alone."""
    try:
        encoder_folder()
    except InputError:
        return False
    return True


def about() -> str:
    """What it is and has learnt from, for the details of results."""
    sentences = (
        "ridge on sentence vectors (OASST multi-sample; alpaca_en_demo)" if has_encoder() else "no sentence encoder"
    )
    return (
        "blend of: the shipped predictor (outputs of Open-Assistant's openly licensed models); Lexical on OASST, "
        f"Arena-Hard, ZeroEval, GPTeacher, alpaca_en_demo; {sentences}; scaled on Arena-Hard prompts; AlpacaEval unseen"
    )
