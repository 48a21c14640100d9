"""The prompt as predictors know it, and its length."""

from __future__ import annotations

from collections.abc import Callable

from lengthwise.gateway.edge._bodies import Chat, Completion, Message
from lengthwise.gateway.leading import NOTHING, Leading, Prints
from lengthwise.predict.tokens import PER_BYTE, PER_DIGIT, PER_PIECE, estimated_tokens

_SLICE, _ASCII_SLICE = 512, 1 << 14
_WORDS = bytes(ord("w") if chr(c).isalnum() or c == ord("_") else ord(" ") for c in range(128)) + bytes(128)
_MARKS = bytes(c for c in range(128) if not (chr(c).isalnum() or chr(c).isspace() or c == ord("_")))


def chat_text(body: Chat) -> str:
    """What is said in all messages, joined by blank lines: as training files of messages are read."""
    return "\n\n".join([_said(message) for message in body.messages])


def prompt_of(body: Completion) -> tuple[str, int]:
    """The text of all prompts and their tokens in all; token ids have no text."""
    if isinstance(body.prompt, str):
        return body.prompt, tokens_of(body.prompt)
    first = body.prompt[0]
    if isinstance(first, str):
        text = "\n\n".join([prompt for prompt in body.prompt if isinstance(prompt, str)])
        return text, tokens_of(text)
    if isinstance(first, int):
        return "", len(body.prompt)
    return "", sum([len(prompt) for prompt in body.prompt if isinstance(prompt, list)])


def leading_of(prints: Prints, body: Chat | Completion, text: str, tokens: int, tenant: int) -> Leading:
    """How the prompt begins; of several in one body nothing is said."""
    if isinstance(body, Chat) or isinstance(body.prompt, str):
        return prints.of_text(text, tokens, model=body.model, tenant=tenant)
    only: object = body.prompt if isinstance(body.prompt[0], int) else body.prompt[0]
    if only is not body.prompt and len(body.prompt) > 1:
        return NOTHING
    if isinstance(only, list):
        return prints.of_ids(only, model=body.model, tenant=tenant)
    return prints.of_text(text, tokens, model=body.model, tenant=tenant)


def tokens_of(text: str) -> int:
    """Estimated tokens of a text; of a long one three slices are read, so that it takes no longer."""
    if text.isascii():
        return _sampled(text, _ASCII_SLICE, ascii_tokens)
    return _sampled(text, _SLICE, estimated_tokens)


def ascii_tokens(text: str) -> int:
    """What ``estimated_tokens`` says of an ASCII text, ten times as fast."""
    data = text.encode("ascii")
    marks = len(data) - len(data.translate(None, _MARKS))
    digits = len(data) - len(data.translate(None, b"0123456789"))
    words = data.translate(_WORDS)
    pieces = words.count(b" w") + words.startswith(b"w") + marks
    return max(1, round(PER_BYTE * len(data) + PER_PIECE * pieces + PER_DIGIT * digits))


def _sampled(text: str, size: int, count: Callable[[str], int]) -> int:
    if len(text) <= 3 * size:
        return count(text)
    middle = (len(text) - size) // 2
    slices = (text[:size], text[middle : middle + size], text[-size:])
    return round(sum(map(count, slices)) * len(text) / (3 * size))


def _said(message: Message) -> str:
    content = message.content
    if content is None or isinstance(content, str):
        return content or ""
    return "".join([part if isinstance(part, str) else part.text or "" for part in content])
