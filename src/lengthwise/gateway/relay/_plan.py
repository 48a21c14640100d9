"""What can be done with a request, known before it is sent."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from lengthwise.backend.openai import CHAT
from lengthwise.gateway.relay._dress import Wants
from lengthwise.gateway.relay._resumable import CARRIED, OPEN, SAME_IN_VLLM, left_open, obstacle
from lengthwise.gateway.relay._seams import Asked, Worker

COMPLETIONS_MAX_TOKENS = 16
"""OpenAI's default of /v1/completions; chat has none."""
_CONTINUED = ("model", "min_tokens")


@dataclass(frozen=True, slots=True)
class Plan:
    """A request, read as far as resuming needs it.

    Attributes:
        wants: What the client asked to see.
        fields: Of the body; {} where nobody has to know them.
        obstacle: Why a cut could change the answer; None: it cannot.
        max_tokens: The longest output asked for; None: as the engine likes.
        open: What an engine might fill in that a cut would change.
    """

    wants: Wants
    fields: dict[str, Any] = field(default_factory=dict)
    obstacle: str | None = "nobody has to know"
    max_tokens: int | None = None
    open: frozenset[str] = frozenset(OPEN)

    def goes_on_at(self, worker: Worker) -> bool:
        """Whether this engine takes and tells token ids, so that what was begun can go on there and elsewhere."""
        able = worker.abilities
        return self.obstacle is None and able.ids_each and able.token_ids

    def cut_at(self, worker: Worker) -> bool:
        """Whether a cut at this engine leaves the answer as it is, its own defaults included."""
        if worker.abilities.own_defaults is False or not self.open:
            return self.goes_on_at(worker)
        return worker.kind == "vllm" and self.open <= SAME_IN_VLLM and self.goes_on_at(worker)

    def tracked_at(self, worker: Worker) -> bool:
        """Whether its token ids are read there: it may be cut, or is a stream that may have to fail over."""
        return self.goes_on_at(worker) if self.wants.stream else self.cut_at(worker)

    def going_on(self) -> Plan:
        """What is left of it once nothing is sent but continuations: all fields but these are the prompt's."""
        kept = {name: self.fields[name] for name in self.fields if name in CARRIED or name in _CONTINUED}
        return replace(self, fields=kept)

    def longest(self, worker: Worker, prompt_tokens: int) -> int | None:
        """How long the output may become there; None: nobody knows."""
        if self.max_tokens is not None:
            return self.max_tokens
        length = worker.abilities.max_model_len
        return None if length is None else length - prompt_tokens


def plan(asked: Asked, *, resumes: bool, window_tokens: int, cuts: bool) -> Plan:
    """What can be done with a request.

    Args:
        asked: By the client.
        resumes: Whether any engine tells token ids.
        window_tokens: An output that is not streamed and not longer is simply done again.
        cuts: Whether requests are cut at all: who is not streamed is else passed on untouched.
    """
    if not resumes or not (asked.stream or cuts):
        return Plan(Wants(asked.api, asked.stream, usage=False, usage_each=False, ids=False))
    longest = asked.max_tokens
    if longest is None and asked.api != CHAT:
        longest = COMPLETIONS_MAX_TOKENS
    fields = asked.fields()
    against = obstacle(fields)
    if not asked.stream and longest is not None and longest <= window_tokens:
        against = "short: it is done again instead"
    return Plan(Wants.of(asked.api, asked.stream, fields), fields, against, longest, left_open(fields))
