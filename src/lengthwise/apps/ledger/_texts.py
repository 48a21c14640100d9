"""Texts and token numbers as bytes: what a model says may hold a NUL or half a surrogate, which text columns refuse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lengthwise.apps.ledger.contracts import Output, Partial, State, TaskRow


def packed(text: str) -> bytes:
    """Any text, as UTF-8 that ``unpacked`` turns back into the same."""
    return text.encode("utf-8", "surrogatepass")


def unpacked(data: bytes) -> str:
    """The text of ``packed``."""
    return bytes(data).decode("utf-8", "surrogatepass")


def packed_ids(ids: Sequence[int]) -> bytes:
    """Tokens, eight bytes each."""
    return np.asarray(ids, "<i8").tobytes()


def unpacked_ids(data: bytes) -> tuple[int, ...]:
    """The tokens of ``packed_ids``."""
    return tuple(np.frombuffer(bytes(data), "<i8").tolist())


def output(text: bytes, finish_reason: str, prompt_tokens: int, output_tokens: int) -> Output:
    """An answer, of the columns of ``results``."""
    return Output(unpacked(text), finish_reason, prompt_tokens, output_tokens)


def partial(text: bytes, prompt_ids: bytes, output_ids: bytes) -> Partial:
    """An answer so far, of the columns of ``partials``."""
    return Partial(unpacked(text), unpacked_ids(prompt_ids), unpacked_ids(output_ids))


def task_row(task: int, state: int, attempts: int, key: str | None, error: Any, *answer: Any) -> TaskRow:
    """A task, of the columns of ``tasks`` and those of its answer (none: the first is None)."""
    told = None if error is None else unpacked(error)
    return TaskRow(task, State(state), attempts, key, None if answer[0] is None else output(*answer), told)
