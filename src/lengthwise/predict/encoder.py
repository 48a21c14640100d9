"""Lengths by what a prompt, and the output so far, mean to a sentence encoder: a few milliseconds a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from lengthwise.predict._state import State
from lengthwise.predict.contract import Samples
from lengthwise.predict.encoder_text import SentenceEncoder
from lengthwise.predict.lexical import Lexical
from lengthwise.schema.errors import InputError


class Encoder(Lexical):
    """What ``Lexical`` reads, and what a frozen sentence encoder makes of it.

    The prompt's vector (the means of two middle layers over its first and last tokens) and the lexical
    features go to small networks, whose share of the location is chosen by cross-validation over prompts. Once
    tokens have come, the vector of the last of them goes beside the marks of the text so far to what tells
    what is left, as ELIS re-predicts after each window of 50 tokens (Choi et al. 2025). Everything
    else, offsets of models, spread, cut outputs, is as in ``Lexical``.

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
        super().__init__(seed, window_tokens, most_windows)
        self.folder, self.layers = folder, layers
        self.head_tokens, self.tail_tokens, self.output_tokens = head_tokens, tail_tokens, output_tokens
        for name in _READS:
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1; it is {getattr(self, name)}")
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
        self.fingerprint_ = None
        self.fingerprint_ = self.encoder.fingerprint
        super().fit(samples)
        self.facts_["encoder_sha256"] = self.fingerprint_
        return self

    def _vectors(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        return self.encoder.embed([str(text) for text in texts], self.head_tokens, self.tail_tokens)

    def _endings(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        return self.encoder.embed(texts, 0, self.output_tokens)

    def state(self) -> State:
        """What is saved: what was learnt and the encoder's fingerprint, not the encoder."""
        meta, arrays = super().state()
        own = {name: getattr(self, name) for name in _READS}
        folder = None if self.folder is None else str(self.folder)
        return {**meta, **own, "folder": folder, "fingerprint": self.fingerprint_}, arrays

    @classmethod
    def from_state(cls, meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Self:
        """The predictor that was saved; the encoder itself is looked for when it first predicts."""
        reads = {name: int(meta[name]) for name in _READS}
        windows = {name: int(meta[name]) for name in ("window_tokens", "most_windows", "seed")}
        made = cls(meta["folder"], **reads, **windows)
        made.fingerprint_ = str(meta["fingerprint"])
        made._unpack(meta, arrays)
        return made


_READS = ("layers", "head_tokens", "tail_tokens", "output_tokens")
