"""Measured out of the rows of a run, with what must be doubted of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.backend.openai import Abilities
from lengthwise.measure._assemble import records_of
from lengthwise.measure._prefix_cache import found_doubt
from lengthwise.measure.load._failures import failures_of
from lengthwise.measure.load._row import Row
from lengthwise.measure.load._run import Run
from lengthwise.measure.load._watch import Watch
from lengthwise.schema.measured import BENCH, Measured, TokenTimes
from lengthwise.schema.records import Records, Status

Floats = npt.NDArray[np.float64]
_EXACT_SHARE = 0.01


def measured_of(run: Run, watch: Watch, end_s: float, facts: Mapping[str, Any], seed: int) -> Measured:
    """What happened in a run; ``end_s`` is on the clock of ``time.perf_counter``."""
    rows, tokens = run.rows, _pieces(run.rows, run.start_s)
    records = _records(run, end_s - run.start_s, tokens, seed)
    told = [row for row in rows if row is not None]
    client_s = np.array(
        [row.sent_s - row.due_s if row and row.sent_s is not None else np.nan for row in rows]
    )
    errors = Counter(row.reason for row in told if row.reason)
    finished = [row for row in told if row.status == Status.FINISHED]
    ends = Counter(row.finish_reason or "not told" for row in finished)
    ttft_s = records.requests.first_token_s - records.requests.arrival_s
    ttft_s = ttft_s[np.isfinite(ttft_s)]
    watch.close(client_s[np.isfinite(client_s)], float(np.median(ttft_s)) if len(ttft_s) else np.inf)
    own = {"client": watch.facts, "finish_reasons": dict(ends), "failures": failures_of(told)}
    every = {**facts, **own, "prompts": run.prompts.how}
    found = found_doubt(every)
    return Measured(
        records,
        replace(run.workload, name=run.workload.name or "workload"),
        BENCH,
        every,
        (*_doubts(run, told, errors), *([found] if found else []), *watch.doubts()),
        dict(errors),
        tokens,
        client_s,
    )


def _records(run: Run, end_s: float, tokens: TokenTimes, seed: int) -> Records:
    rows, workload = run.rows, run.workload
    closed = workload.concurrency is not None
    due_s = np.array([np.nan if row is None else row.due_s - run.start_s for row in rows])
    if not closed:
        due_s = workload.arrival_s.copy()  # also of those that the run's end came before
    done = [row is not None and row.status == Status.FINISHED for row in rows]
    last_s = [
        row.at_s[-1] - run.start_s if ok and row else np.nan for ok, row in zip(done, rows, strict=True)
    ]
    return records_of(
        arrival_s=due_s,
        prompt_tokens=np.array(
            [_prompt(row, int(n)) for row, n in zip(rows, workload.prompt_tokens, strict=True)]
        ),
        output_tokens=np.array([row.output_tokens if row else 0 for row in rows]),
        status=[row.status if row else Status.UNFINISHED for row in rows],
        first_token_s=np.array([row.at_s[0] - run.start_s if row and row.at_s else np.nan for row in rows]),
        finished_s=np.array(last_s),
        end_s=end_s,
        tokens=tokens,
        seed=seed,
        name=workload.name,
    )


def _prompt(row: Row | None, wanted: int) -> int:
    told = row.usage.prompt_tokens if row is not None and row.usage is not None else 0
    return wanted if row is None or row.lied_of_prompt else told or wanted


def _pieces(rows: Sequence[Row | None], start_s: float) -> TokenTimes:
    lengths = [0 if row is None else len(row.at_s) for row in rows]
    start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    at_s = [at for row in rows if row is not None for at in row.at_s]
    tokens = [count for row in rows if row is not None for count in row.counts]
    return TokenTimes(start, np.array(at_s, np.float64) - start_s, np.array(tokens, np.int64))


def _doubts(run: Run, told: Sequence[Row], errors: Mapping[str, int]) -> list[str]:
    made = list(run.prompts.doubts)
    finished = [row for row in told if row.status == Status.FINISHED]
    ended = sum(row.ended for row in told)
    if run.why_ended:
        made.append(
            f"a partial run, ended by {run.why_ended}: {ended:,} of {len(run.rows):,} requests had ended by then"
        )
    if failed := sum(errors.values()):
        listed = ", ".join(f"{name}: {count:,}" for name, count in sorted(errors.items()))
        made.append(f"{failed:,} of {len(told):,} requests failed ({listed}); latencies are of the others")
    return made + _lengths(run, finished) + _tokens(run.client.abilities, finished)


def _lengths(run: Run, finished: Sequence[Row]) -> list[str]:
    """Where prompts or outputs are not as long as was asked for."""
    made = []
    workload = run.workload
    rows = [(i, row) for i, row in enumerate(run.rows) if row is not None and row.status == Status.FINISHED]
    told = [
        (int(workload.prompt_tokens[i]), row.usage.prompt_tokens) for i, row in rows if row.usage is not None
    ]
    wrong = [(want, got) for want, got in told if got and want != got]
    if len(wrong) > _EXACT_SHARE * len(finished):
        off = float(np.mean([got / want - 1 for want, got in wrong]))
        made.append(
            f"{len(wrong):,} of {len(finished):,} prompts were not as long as wanted by the server's count "
            f"({100 * off:+.1f} % on average); records hold its count"
        )
    short = [row for row in finished if row.output_tokens != row.wanted_tokens]
    if len(short) > _EXACT_SHARE * len(finished):
        share = sum(r.output_tokens for r in short) / max(1, sum(r.wanted_tokens for r in short))
        made.append(
            f"{len(short):,} of {len(finished):,} outputs were not as long as wanted ({100 * share:.0f} % of it): "
            "the server does not ignore the end of text; compare only with a simulation of the lengths that came"
        )
    return made


def _tokens(able: Abilities, finished: Sequence[Row]) -> list[str]:
    """Where numbers or times of tokens are not known."""
    if finished and not any(row.usage is not None or any(row.tokens) for row in finished):
        return ["the server does not tell how many tokens it made: each piece was taken for one"]
    vague = sum(not any(row.counts) for row in finished)
    if vague and not (able.usage_each or able.ids_each):
        doubt = (
            f"in {vague:,} of {len(finished):,} answers a piece held several tokens and nobody told how many: "
            "times between tokens (TBT) are times between pieces there"
        )
        return [doubt]
    return []
