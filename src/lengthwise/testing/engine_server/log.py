"""What an emulated engine saw and did, request by request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Entry:
    """One request.

    Attributes:
        number: Since the start of the server, from 0; restarts do not begin anew.
        api: "completions" or "chat".
        headers: As they came, names in lower case.
        body: Parsed; {} where it could not be.
        came_s: On the event loop's clock.
        arrival_s: When it entered the batch, on the engine's own time; None: never.
        prompt_ids: After the template.
        fault: The kind of its fault, "" none.
        status: HTTP status; 0 where no answer began.
        sent: Pieces of a stream, (time on the event loop's clock, tokens of it).
        output_ids: What was generated for its first choice.
        finished_s: When its last token came out of the batch, on the engine's own time.
        ended: "" while it runs; "finished", "refused", "aborted" (the client left, or asked for it),
            "closed" (by a fault), "died" (with the engine).
    """

    number: int
    api: str
    headers: dict[str, str]
    came_s: float
    body: dict[str, Any] = field(default_factory=dict)
    arrival_s: float | None = None
    prompt_ids: list[int] = field(default_factory=list)
    fault: str = ""
    status: int = 0
    sent: list[tuple[float, int]] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    finished_s: float | None = None
    ended: str = ""

    @property
    def output_tokens(self) -> int:
        """Tokens that were generated for its first choice, sent or not."""
        return len(self.output_ids)

    @property
    def sent_tokens(self) -> int:
        """Tokens that were sent."""
        return sum(tokens for _, tokens in self.sent)


class Log:
    """All of them, the first first.

    Attributes:
        entries: One each.
        others: Paths of all other requests that came, such as "GET /health".
        most_at_once: Most requests that were open at the same time.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.others: list[str] = []
        self.open = 0
        self.most_at_once = 0

    def begin(self, api: str, headers: dict[str, str], now_s: float) -> Entry:
        """A new entry."""
        entry = Entry(len(self.entries), api, headers, now_s)
        self.entries.append(entry)
        self.open += 1
        self.most_at_once = max(self.most_at_once, self.open)
        return entry

    def end(self, entry: Entry, how: str) -> None:
        """How it ended; the first word on that is the last."""
        if not entry.ended:
            entry.ended = how
            self.open -= 1

    def count(self, how: str) -> int:
        """Requests that ended so."""
        return sum(entry.ended == how for entry in self.entries)
