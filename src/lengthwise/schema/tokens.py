"""Tokens of a text when nobody counted them."""

from __future__ import annotations

import re

_PIECE = re.compile(r"\w+|[^\w\s]")
_DIGIT = re.compile(r"\d")

PER_BYTE, PER_PIECE, PER_DIGIT = 0.060, 0.717, 1.099
"""Least squares of the relative error on 13,195 outputs of 35 models against a 131,072-word BPE vocabulary
(Mistral's Tekken): half are within 3.6 %, nine in ten within 10 %. Bytes carry scripts without spaces."""


def estimated_tokens(text: str) -> int:
    """An estimate of how many tokens a text has, at least 1; no tokenizer is asked.

    It weighs UTF-8 bytes, words and punctuation marks, and digits. Tokenizers differ by 20 % among
    themselves, so where lengths must agree with an engine's, give its counts.
    """
    pieces, digits = len(_PIECE.findall(text)), len(_DIGIT.findall(text))
    tokens = PER_BYTE * len(text.encode("utf-8", "replace")) + PER_PIECE * pieces + PER_DIGIT * digits
    return max(1, round(tokens))
