"""The tables of a ledger in PostgreSQL, and what PostgreSQL says in its own way."""

from __future__ import annotations

from lengthwise.apps.ledger._sql import Dialect

FORMAT = 1
MARK = "lengthwise ledger, format "
"""The comment of a schema that is ours, before its format."""

TABLES = (
    "CREATE TABLE run (identity text NOT NULL, tasks bigint NOT NULL, fence bigint NOT NULL)",
    "INSERT INTO run VALUES ('', 0, 0)",
    """CREATE TABLE tasks (
        task bigint PRIMARY KEY, call int NOT NULL, model int NOT NULL,
        state smallint NOT NULL CHECK (state BETWEEN 0 AND 6), pending int NOT NULL CHECK (pending >= 0),
        fence bigint NOT NULL, attempts int NOT NULL DEFAULT 0, not_before_s float8 NOT NULL DEFAULT 0,
        until_s float8 NOT NULL DEFAULT 0, owner text, key text, error bytea)""",
    "CREATE INDEX ready ON tasks (model, task) WHERE state = 1",
    "CREATE INDEX leased ON tasks (owner) WHERE state = 2",
    "CREATE TABLE edges (parent bigint NOT NULL, child bigint NOT NULL, PRIMARY KEY (parent, child))",
    """CREATE TABLE results (
        key text PRIMARY KEY, output bytea NOT NULL, finish_reason text NOT NULL, prompt_tokens bigint NOT NULL,
        output_tokens bigint NOT NULL)""",
    """CREATE TABLE partials (
        key text PRIMARY KEY, output bytea NOT NULL, prompt_ids bytea NOT NULL, output_ids bytea NOT NULL)""",
    "CREATE TABLE facts (name text PRIMARY KEY, value bytea NOT NULL)",
)

DIALECT = Dialect(
    numbers="= ANY (?::bigint[])",
    texts="= ANY (?::text[])",
    lock="FOR UPDATE",
    skip="FOR UPDATE SKIP LOCKED",
    answers="""INSERT INTO results (key, output, finish_reason, prompt_tokens, output_tokens)
        SELECT * FROM unnest(?::text[], ?::bytea[], ?::text[], ?::bigint[], ?::bigint[])
        ON CONFLICT (key) DO NOTHING""",
    partials="""INSERT INTO partials (key, output, prompt_ids, output_ids)
        SELECT * FROM unnest(?::text[], ?::bytea[], ?::bytea[], ?::bytea[])
            AS came (key, output, prompt_ids, output_ids)
        WHERE NOT EXISTS (SELECT 1 FROM results WHERE results.key = came.key)
        ON CONFLICT (key) DO UPDATE
        SET output = excluded.output, prompt_ids = excluded.prompt_ids, output_ids = excluded.output_ids""",
    facts="""INSERT INTO facts (name, value) SELECT * FROM unnest(?::text[], ?::bytea[])
        ON CONFLICT (name) DO UPDATE SET value = excluded.value""",
    moved="""UPDATE tasks SET state = came.state, attempts = attempts + came.counts, key = came.key,
        not_before_s = came.not_before_s, owner = NULL,
        error = CASE WHEN came.state = 1 THEN coalesce(came.error, tasks.error) ELSE came.error END
        FROM unnest(?::smallint[], ?::int[], ?::text[], ?::bytea[], ?::float8[], ?::bigint[])
            AS came (state, counts, key, error, not_before_s, task)
        WHERE tasks.task = came.task AND tasks.state = 2""",
    empty=("TRUNCATE edges, tasks",),
    laid_out=("ANALYZE tasks", "ANALYZE edges"),
    counts="SELECT call, state, count(*) FROM tasks GROUP BY call, state",
)
