"""Tokens of a text when nobody counted them; traces are counted in the same way."""

from lengthwise.schema.tokens import PER_BYTE, PER_DIGIT, PER_PIECE, estimated_tokens

__all__ = ["PER_BYTE", "PER_DIGIT", "PER_PIECE", "estimated_tokens"]
