"""What is asked of an engine for one task, and by which key its answer is known."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CHAT, COMPLETIONS = "chat", "completions"


@dataclass(frozen=True)
class Request:
    """A request of a task.

    Attributes:
        model: Index into ``Tasks.models``.
        api: "chat" or "completions".
        prompt: Messages (a list of role and content), or a text.
        max_tokens: Longest output.
        sampling: Further fields of the body: temperature, top_p, stop, seed and what the user passes on.
        which: What tells the task apart from others of the same content where decoding is not greedy, else "".
    """

    model: int
    api: str
    prompt: Any
    max_tokens: int
    sampling: Mapping[str, Any] = field(default_factory=dict)
    which: str = ""

    def fields(self) -> dict[str, Any]:
        """The body's fields but for the model's name, in an OpenAI server's words."""
        said = {"messages": self.prompt} if self.api == CHAT else {"prompt": self.prompt}
        return {**said, "max_tokens": self.max_tokens, **self.sampling}

    def key(self, revision: str) -> str:
        """SHA-256 of all that the answer follows from: the model's revision, the body, and which task it is."""
        whole = json.dumps([revision, self.fields(), self.which], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True)
class Skipped:
    """No request: a branch that was not taken, a round or an item that is not there."""

    why: str


__all__ = ["CHAT", "COMPLETIONS", "Request", "Skipped"]
