"""transformers' continuous batching as a real engine: a process that is fed runs, its answers as Measured.

Its scheduler "fifo" forms the steps that vLLM v1 does (decodes, then prompts in order, cut to the budget). Its
attention does not: every query of a step is masked against the cache of the whole batch, so that a prompt beside
many decodes pays for all of their tokens. Calibration finds that in the runs (``masked_s`` of the cost tables); a
profile of operators, which measures sequences alone, does not know it.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise import Records, Status, Workload
from lengthwise.schema.errors import EngineError
from lengthwise.schema.records import (
    BENCH,
    Measured,
    ReplicaTotals,
    RequestRecords,
    StepRecords,
    TimeSeries,
    TokenGaps,
    TokenTimes,
)

SCRIPT = Path(__file__).parent / "engines" / "continuous_batching.py"
KILL_S = 10.0
_TOTALS_WHOLE = ("steps", "tokens")


@dataclass(frozen=True)
class Engine:
    """A running engine; ``facts`` is what it says of itself, ``lines`` come from its pipe (None: its end)."""

    process: subprocess.Popen[str]
    folder: Path
    lines: queue.Queue[str | None]
    metadata: Mapping[str, Any]

    def run(self, workload: Workload, limit_s: float = math.inf) -> Measured:
        """What happened to the workload's requests, sent at their times.

        Raises:
            EngineError: The engine ended, or was not done within ``limit_s``, and was ended for it.
        """
        out = self.folder / "run.json"
        wanted = {
            "out": str(out),
            "arrival_s": workload.arrival_s.tolist(),
            "prompt_tokens": workload.prompt_tokens.tolist(),
            "output_tokens": workload.output_tokens.tolist(),
            "concurrency": workload.concurrency,
        }
        assert self.process.stdin
        with contextlib.suppress(OSError):  # it has ended: what it said last is told below
            self.process.stdin.write(json.dumps(wanted) + "\n")
            self.process.stdin.flush()
        _expect(self, "done", limit_s)
        return measured(json.loads(out.read_text()), workload, self.metadata)


def _expect(engine: Engine, word: str, limit_s: float) -> str:
    """The rest of the line that begins so; an error with the engine's last words if it ends or hangs before."""
    until = time.monotonic() + limit_s
    while True:
        try:
            left_s = min(until - time.monotonic(), threading.TIMEOUT_MAX)
            line = engine.lines.get(timeout=max(0.0, left_s))
        except queue.Empty:
            engine.process.kill()
            raise EngineError(f"the engine did not say {word.strip()!r} within {limit_s:.0f} s{_log(engine)}") from None
        if line is None:
            raise EngineError(f"the engine ended with status {_finished(engine.process)}{_log(engine)}")
        if line.startswith(word):
            return line[len(word) :]


def _log(engine: Engine) -> str:
    told = (engine.folder / "engine.log").read_text(errors="replace")[-3000:].strip()
    return f":\n{told}" if told else ""


def _finished(process: subprocess.Popen[str]) -> int | None:
    """Its status; None if even a kill does not end it, as when a driver hangs."""
    process.kill()
    try:
        return process.wait(KILL_S)
    except subprocess.TimeoutExpired:
        return None


@contextlib.contextmanager
def started(
    python: str, config: Path, flags: Mapping[str, Any], limit_s: float = math.inf, script: Path = SCRIPT
) -> Iterator[Engine]:
    """The engine in an environment of its own, gone at the end; ready within ``limit_s``."""
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "engine.log").open("w") as log:
        process = subprocess.Popen(
            [python, "-u", str(script), str(config), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        lines: queue.Queue[str | None] = queue.Queue()
        reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
        reader.start()
        try:
            engine = Engine(process, Path(folder), lines, {})
            yield replace(engine, metadata=json.loads(_expect(engine, "ready ", limit_s)))
        finally:
            if _finished(process) is not None:
                reader.join()
                _close(process)


def _read(pipe: Any, lines: queue.Queue[str | None]) -> None:
    for line in pipe:
        lines.put(line)
    lines.put(None)


def _close(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            if pipe:
                pipe.close()


def measured(report: Mapping[str, Any], workload: Workload, metadata: Mapping[str, Any]) -> Measured:
    """Records of what the engine told; a request is due when it should have been sent."""
    failed = [row["error"] for row in report["requests"] if row["error"]]
    closed = workload.concurrency is not None
    late_s = 0.0 if closed else float(np.max(np.array(report["sent_s"]) - workload.arrival_s))
    return Measured(
        records=_records(report, workload),
        workload=workload,
        source=BENCH,
        metadata={**metadata, "latest_send_s": late_s},
        errors={reason: failed.count(reason) for reason in set(failed)},
        tokens=_pieces(report["requests"]),
    )


def _records(report: Mapping[str, Any], workload: Workload) -> Records:
    rows = report["requests"]
    arrival_s = np.array(report["sent_s"]) if workload.concurrency else workload.arrival_s
    good = np.array([row["error"] is None and len(row["token_s"]) > 0 for row in rows])
    n = len(rows)
    requests = RequestRecords(
        arrival_s=arrival_s,
        prompt_tokens=workload.prompt_tokens,
        output_tokens=np.array([row["output_tokens"] for row in rows], dtype=np.int64),
        status=np.where(good, int(Status.FINISHED), int(Status.UNFINISHED)).astype(np.int8),
        replica=np.zeros(n, dtype=np.int32),
        scheduled_s=np.full(n, np.nan),
        first_token_s=_times(rows, 0),
        finished_s=_times(rows, -1),
        preemptions=np.zeros(n, dtype=np.int32),
        queued_for_s=np.full(n, np.nan),
        rejection=np.zeros(n, dtype=np.int8),
    )
    gap_s = np.sort(np.concatenate([np.diff(row["token_s"]) for row in rows]))
    return Records(
        requests=requests,
        steps=_steps(report),
        gaps=_gaps(gap_s),
        totals=_totals(report),
        series=TimeSeries(1.0, *(np.zeros(1) for _ in range(6))),
        end_s=float(report["end_s"]),
        seed=0,
        name=workload.name,
    )


def _times(rows: Sequence[Mapping[str, Any]], which: int) -> np.ndarray:
    return np.array([row["token_s"][which] if row["token_s"] else np.nan for row in rows])


def _column(report: Mapping[str, Any], name: str) -> np.ndarray:
    k = list(report["step_columns"]).index(name)
    return np.array([row[k] for row in report["steps"]], dtype=np.float64)


def _steps(report: Mapping[str, Any]) -> StepRecords:
    count = len(report["steps"])
    whole = {name: _column(report, name).astype(np.int64) for name in report["step_columns"][3:]}
    return StepRecords(
        start_s=_column(report, "start_s"),
        end_s=_column(report, "end_s"),
        replica=np.zeros(count, dtype=np.int64),
        decode_seqs=whole["decode_seqs"],
        prefill_seqs=whole["prefill_seqs"],
        prefill_tokens=whole["prefill_tokens"],
        kv_blocks=np.zeros(count, dtype=np.int64),
        waiting=np.zeros(count, dtype=np.int64),
    )


def _totals(report: Mapping[str, Any]) -> ReplicaTotals:
    import dataclasses

    tokens = float((_column(report, "prefill_tokens") + _column(report, "decode_seqs")).sum())
    known = {
        "steps": len(report["steps"]),
        "tokens": tokens,
        "attention_pairs": _column(report, "pairs").sum(),
        "busy_s": (_column(report, "end_s") - _column(report, "start_s")).sum(),
    }
    return ReplicaTotals(
        **{
            field.name: np.array(
                [known.get(field.name, 0)], dtype=np.int64 if field.name in _TOTALS_WHOLE else np.float64
            )
            for field in dataclasses.fields(ReplicaTotals)
        }
    )


def _gaps(gap_s: np.ndarray) -> TokenGaps:
    """The gaps between tokens, in bins that are 1/128 of their lower edge wide."""
    low, high = 2.0**-20, 2.0**12
    edges_s = np.concatenate([[0.0], np.geomspace(low, high, 128 * 23)])
    histogram = np.histogram(np.clip(gap_s, 0, high * 0.999), edges_s)[0].astype(np.int64)
    values, counts = np.unique(gap_s, return_counts=True)
    return TokenGaps(
        histogram=histogram,
        edges_s=edges_s,
        total=len(gap_s),
        sum_s=float(gap_s.sum()),
        max_s=float(gap_s.max(initial=0.0)),
        gap_s=values,
        count=counts.astype(np.int64),
    )


def _pieces(rows: Sequence[Mapping[str, Any]]) -> TokenTimes:
    lengths = [len(row["token_s"]) for row in rows]
    return TokenTimes(
        start=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        at_s=np.concatenate([np.array(row["token_s"], dtype=np.float64) for row in rows]),
        tokens=np.ones(sum(lengths), dtype=np.int64),
    )
