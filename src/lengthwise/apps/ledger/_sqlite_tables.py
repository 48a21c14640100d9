"""The tables of a ledger in SQLite, and what SQLite says in its own way."""

from __future__ import annotations

from lengthwise.apps.ledger._sql import Dialect

APPLICATION = 0x6C774C67
"""In the file's head, so that another program's database is not taken for ours: "lwLg"."""
FORMAT = 1

TABLES = (
    "CREATE TABLE run (identity TEXT NOT NULL, tasks INTEGER NOT NULL, fence INTEGER NOT NULL) STRICT",
    "INSERT INTO run VALUES ('', 0, 0)",
    """CREATE TABLE tasks (
        task INTEGER PRIMARY KEY, call INTEGER NOT NULL, model INTEGER NOT NULL,
        state INTEGER NOT NULL CHECK (state BETWEEN 0 AND 6), pending INTEGER NOT NULL CHECK (pending >= 0),
        fence INTEGER NOT NULL, attempts INTEGER NOT NULL DEFAULT 0, not_before_s REAL NOT NULL DEFAULT 0,
        until_s REAL NOT NULL DEFAULT 0, owner TEXT, key TEXT, error BLOB) STRICT""",
    "CREATE INDEX ready ON tasks (model, task) WHERE state = 1",
    "CREATE INDEX leased ON tasks (owner) WHERE state = 2",
    """CREATE TABLE edges (parent INTEGER NOT NULL, child INTEGER NOT NULL, PRIMARY KEY (parent, child))
        STRICT, WITHOUT ROWID""",
    # Answers are appended; only their keys, which are random, are put in order.
    """CREATE TABLE results (
        id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, output BLOB NOT NULL, finish_reason TEXT NOT NULL,
        prompt_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL) STRICT""",
    """CREATE TABLE partials (
        key TEXT PRIMARY KEY, output BLOB NOT NULL, prompt_ids BLOB NOT NULL, output_ids BLOB NOT NULL) STRICT""",
    "CREATE TABLE facts (name TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT",
    # Counts are kept along, so that looking at a run of a million tasks costs nothing.
    """CREATE TABLE tally (
        call INTEGER NOT NULL, state INTEGER NOT NULL, tasks INTEGER NOT NULL CHECK (tasks >= 0),
        PRIMARY KEY (call, state)) STRICT, WITHOUT ROWID""",
    """CREATE TRIGGER moved AFTER UPDATE OF state ON tasks WHEN new.state <> old.state BEGIN
        UPDATE tally SET tasks = tasks - 1 WHERE call = old.call AND state = old.state;
        UPDATE tally SET tasks = tasks + 1 WHERE call = new.call AND state = new.state;
    END""",
)

DIALECT = Dialect(
    numbers="IN (SELECT value FROM json_each(?))",
    texts="IN (SELECT value FROM json_each(?))",
    lock="",
    skip="",
    answers="""INSERT INTO results (key, output, finish_reason, prompt_tokens, output_tokens) VALUES (?, ?, ?, ?, ?)
        ON CONFLICT (key) DO NOTHING""",
    partials="""INSERT INTO partials (key, output, prompt_ids, output_ids) SELECT ?1, ?2, ?3, ?4
        WHERE NOT EXISTS (SELECT 1 FROM results WHERE key = ?1)
        ON CONFLICT (key) DO UPDATE
        SET output = excluded.output, prompt_ids = excluded.prompt_ids, output_ids = excluded.output_ids""",
    facts="INSERT INTO facts (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
    moved="""UPDATE tasks SET state = ?1, attempts = attempts + ?2, key = ?3, not_before_s = ?5, owner = NULL,
        error = CASE WHEN ?1 = 1 THEN coalesce(?4, error) ELSE ?4 END WHERE task = ?6 AND state = 2""",
    empty=("DELETE FROM edges", "DELETE FROM tasks", "DELETE FROM tally"),
    laid_out=(
        """INSERT INTO tally (call, state, tasks)
        WITH states (state) AS (VALUES (0), (1), (2), (3), (4), (5), (6)),
            counted AS MATERIALIZED (SELECT call, state, count(*) AS tasks FROM tasks GROUP BY call, state),
            calls AS (SELECT DISTINCT call FROM counted)
        SELECT calls.call, states.state, coalesce(counted.tasks, 0)
        FROM calls CROSS JOIN states LEFT JOIN counted ON counted.call = calls.call AND counted.state = states.state""",
    ),
    counts="SELECT call, state, tasks FROM tally WHERE tasks > 0",
)
