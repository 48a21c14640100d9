"""The ledger's statements, told once for all stores; what stores say in their own way is a ``Dialect``.

States stand as numbers, so that partial indices can be chosen: 0 waiting, 1 ready, 2 leased, 3 done, 4 skipped, 5 dead,
6 blocked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from lengthwise.apps.ledger._layout import Chunk

Work = TypeVar("Work")


@dataclass(frozen=True)
class Dialect:
    """What differs.

    Attributes:
        numbers: After a column: is one of a list of numbers.
        texts: The same of texts.
        lock: Holds rows that were read until the end of the transaction.
        skip: The same, leaving out what another holds.
        answers: Inserts into ``results``, by column; the first of a key stays.
        partials: Inserts into ``partials``, by column, unless the key has a result; the last of a key stays.
        facts: Inserts into ``facts``; the last of a name stays.
        moved: Ends leases, by the columns of ``Writes.moved``.
        empty: Empties tasks and edges.
        laid_out: What to do when tasks were inserted.
        counts: (call, state, tasks).
    """

    numbers: str
    texts: str
    lock: str
    skip: str
    answers: str
    partials: str
    facts: str
    moved: str
    empty: tuple[str, ...]
    laid_out: tuple[str, ...]
    counts: str


class Session(Protocol):
    """Inside one transaction."""

    def rows(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """What a statement returns, all of it."""
        ...

    def changed(self, statement: str, *values: Any) -> int:
        """How many rows a statement changed."""
        ...

    def many(self, statement: str, rows: list[tuple[Any, ...]]) -> None:
        """One of the dialect's statements by column, for many rows."""
        ...

    def load(self, table: str, columns: tuple[str, ...], chunks: Iterator[Chunk]) -> None:
        """Fills a table with numbers."""
        ...


class Store(Protocol):
    """A database: transactions that happen whole or not at all, and errors in the words of lengthwise."""

    dialect: Dialect
    where: str

    def write(self, work: Callable[[Session], Work]) -> Work:
        """What the work returns, when all that it changed is durable. It may be called again from its start."""
        ...

    def read(self, work: Callable[[Session], Work]) -> Work:
        """What the work returns; it holds nobody up."""
        ...

    def close(self) -> None:
        """Lets go."""
        ...


_LEASE = """
WITH picked AS MATERIALIZED (
    SELECT task FROM tasks WHERE model = ? AND state = 1 AND not_before_s <= ? ORDER BY task LIMIT ? {skip})
UPDATE tasks SET state = 2, fence = fence + 1, owner = ?, until_s = ?
WHERE task IN (SELECT task FROM picked) RETURNING task, fence, attempts"""

_BEAT = "UPDATE tasks SET until_s = ? WHERE state = 2 AND owner = ?"

_EXPIRE = """
WITH picked AS MATERIALIZED (SELECT task FROM tasks WHERE state = 2 AND until_s <= ? {skip})
UPDATE tasks SET state = 1, owner = NULL WHERE state = 2 AND task IN (SELECT task FROM picked)"""

_HELD = "SELECT task, fence FROM tasks WHERE state = 2 AND task {numbers} ORDER BY task {lock}"

_CHILDREN = """
SELECT task FROM tasks WHERE task IN (SELECT child FROM edges WHERE parent {numbers}) ORDER BY task {lock}"""

_FREE = """
UPDATE tasks SET pending = pending - freed.parents,
    state = CASE WHEN state = 0 AND pending = freed.parents THEN 1 ELSE state END
FROM (SELECT child, count(*) AS parents FROM edges WHERE parent {numbers} GROUP BY child) AS freed
WHERE tasks.task = freed.child"""

# Behind what is blocked all is blocked already, so that only waiting tasks are gone through.
_BLOCK = """
WITH RECURSIVE behind (task) AS (
    SELECT child FROM edges JOIN tasks ON tasks.task = child WHERE state = 0 AND parent {numbers}
    UNION
    SELECT child FROM behind JOIN edges ON parent = behind.task JOIN tasks ON tasks.task = child WHERE state = 0)
UPDATE tasks SET state = 6 WHERE state = 0 AND task IN (SELECT task FROM behind)"""

_OUTPUTS = """
SELECT task, state, output, finish_reason, prompt_tokens, output_tokens
FROM tasks LEFT JOIN results ON results.key = tasks.key WHERE state IN (3, 4) AND task {numbers}"""

_ROWS = """
SELECT task, state, attempts, tasks.key, error, output, finish_reason, prompt_tokens, output_tokens
FROM tasks LEFT JOIN results ON results.key = tasks.key AND state = 3
WHERE task >= ? ORDER BY task LIMIT ?"""

_LENGTHS = """
SELECT task, state, coalesce(prompt_tokens, 0), coalesce(output_tokens, 0)
FROM tasks LEFT JOIN results ON results.key = tasks.key AND state = 3 WHERE state >= 3 ORDER BY task"""

_SUMS = """
SELECT call, sum(attempts), coalesce(sum(output_tokens), 0)
FROM tasks LEFT JOIN results ON results.key = tasks.key AND state = 3 GROUP BY call ORDER BY call"""

_RESULTS = """
SELECT key, output, finish_reason, prompt_tokens, output_tokens FROM results WHERE key {texts}"""

_PARTIALS = """
SELECT key, output, prompt_ids, output_ids FROM partials
WHERE key {texts} AND NOT EXISTS (SELECT 1 FROM results WHERE results.key = partials.key)"""

_TEMPLATES = {
    "lease": _LEASE,
    "beat": _BEAT,
    "expire": _EXPIRE,
    "held": _HELD,
    "children": _CHILDREN,
    "free": _FREE,
    "block": _BLOCK,
    "outputs": _OUTPUTS,
    "rows": _ROWS,
    "lengths": _LENGTHS,
    "sums": _SUMS,
    "results": _RESULTS,
    "partials": _PARTIALS,
    "spent": "DELETE FROM partials WHERE key {texts}",
    "run": "SELECT identity, tasks, fence FROM run {lock}",
    "fence": "SELECT max(fence) FROM tasks",
    "begin": "UPDATE run SET identity = ?, tasks = ?, fence = ?",
    "facts": "SELECT name, value FROM facts ORDER BY name",
    "forget": "DELETE FROM facts WHERE name {texts}",
}


def statements(dialect: Dialect) -> dict[str, str]:
    """Statements by name, as a store says them."""
    words = {name: getattr(dialect, name) for name in ("numbers", "texts", "lock", "skip")}
    return {name: template.format(**words) for name, template in _TEMPLATES.items()}


def pages(values: Iterable[Any], most: int) -> Iterator[list[Any]]:
    """Lists of at most so many: no statement is told a million values at once."""
    page: list[Any] = []
    for value in values:
        page.append(value)
        if len(page) == most:
            yield page
            page = []
    if page:
        yield page
