"""What may go wrong of a run of an application, in tables that name the tests which hold what then happens."""

from __future__ import annotations

from _apps_faults_ledger import OF_LEDGERS, Row
from _apps_faults_runner import OF_RUNNERS

FAULTS: tuple[tuple[str, tuple[Row, ...]], ...] = (*OF_RUNNERS, OF_LEDGERS)
"""(who, what may go wrong of it)"""


def table() -> str:
    """The tables of the page."""
    parts = []
    for title, rows in FAULTS:
        lines = [f"### {title}\n", "| what goes wrong | what then happens | held by |", "|---|---|---|"]
        lines += [
            f"| {what} | {then} | {', '.join(map(_linked, tests)) or '**missing**'} |" for what, then, tests in rows
        ]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _linked(test: str) -> str:
    file, _, name = test.partition("::")
    words = name.removeprefix("test_").replace("_", " ")
    return f"[{words}](../tests/{file})"
