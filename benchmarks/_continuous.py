"""transformers' continuous batching as a real engine: a process that receives runs, whose answers are a RunResult.

Its scheduler "fifo" forms vLLM v1's steps. Its attention masks every query of a step against the cache of the complete
batch, so that a prompt with many decodes pays for all of their tokens: a calibration finds that (``masked_s`` of the
cost tables), a profile of operators, which measures sequences alone, does not contain it.
"""

import contextlib
import json
import math
import queue
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise import Status, Workload
from lengthwise.backend.process import last_lines
from lengthwise.measure.client_records import records_of
from lengthwise.schema.errors import EngineError
from lengthwise.schema.records import BENCH, RunResult, StepRecords, TokenTimes

SCRIPT = Path(__file__).parent / "engines" / "continuous_batching.py"
KILL_S = 10.0


@dataclass(frozen=True)
class Engine:
    """A running engine; ``metadata`` describes it, ``lines`` come from its pipe (None: its end)."""

    process: subprocess.Popen[str]
    folder: Path
    lines: queue.Queue[str | None]
    metadata: Mapping[str, Any]

    def run(self, workload: Workload, limit_s: float = math.inf) -> RunResult:
        """Send requests at their times; raise EngineError if the engine ends, or is not done in time and is killed."""
        out = self.folder / "run.json"
        columns = {name: getattr(workload, name).tolist() for name in ("arrival_s", "prompt_tokens", "output_tokens")}
        job = {"out": str(out), "concurrency": workload.concurrency} | columns
        assert self.process.stdin
        with contextlib.suppress(OSError):  # it has exited: ``expect`` raises with its last output
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        self.expect("done", limit_s)
        return measured(json.loads(out.read_text()), workload, self.metadata)

    def expect(self, word: str, limit_s: float) -> str:
        """Return the rest of the line that begins with a word; raise EngineError if the engine ends or hangs before."""
        until, log = time.monotonic() + limit_s, self.folder / "engine.log"
        while True:
            try:
                line = self.lines.get(timeout=max(0.0, min(until - time.monotonic(), threading.TIMEOUT_MAX)))
            except queue.Empty:
                self.process.kill()
                message = f"the engine did not print {word.strip()!r} within {limit_s:.0f} s:\n"
                raise EngineError(message + last_lines(log)) from None
            if line is None:
                raise EngineError(f"the engine exited with status {self.killed()}:\n{last_lines(log)}")
            if line.startswith(word):
                return line[len(word) :]

    def killed(self) -> int | None:
        """Kill the process; return its status, None if even that does not end it, as when a driver hangs."""
        self.process.kill()
        try:
            return self.process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            return None


@contextlib.contextmanager
def started(
    python: str, config: Path, flags: Mapping[str, Any], limit_s: float = math.inf, script: Path = SCRIPT
) -> Iterator[Engine]:
    """Start the engine in an environment of its own, ready within ``limit_s``; kill it at the end."""
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command = [python, "-u", str(script), str(config), *words]
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "engine.log").open("w") as log:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
        process = subprocess.Popen(command, **pipes, text=True)
        lines: queue.Queue[str | None] = queue.Queue()
        engine = Engine(process, Path(folder), lines, {})

        def read() -> None:
            for line in process.stdout:
                lines.put(line)
            lines.put(None)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            yield replace(engine, metadata=json.loads(engine.expect("ready ", limit_s)))
        finally:
            if engine.killed() is not None:
                reader.join()
                for pipe in (process.stdin, process.stdout):
                    with contextlib.suppress(OSError):
                        pipe.close()


def measured(report: Mapping[str, Any], workload: Workload, metadata: Mapping[str, Any]) -> RunResult:
    """Return records of the engine's report; a request is due when it should have been sent."""
    rows, closed = report["requests"], workload.concurrency is not None
    sent_s = np.array(report["sent_s"])
    failed = [row["error"] for row in rows if row["error"]]
    finished = np.array([row["error"] is None and len(row["token_s"]) > 0 for row in rows])
    lengths = [len(row["token_s"]) for row in rows]
    tokens = TokenTimes(
        start=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        at_s=np.concatenate([np.array(row["token_s"], dtype=np.float64) for row in rows]),
        tokens=np.ones(sum(lengths), dtype=np.int64),
    )
    first_s, last_s = (np.array([row["token_s"][at] if row["token_s"] else np.nan for row in rows]) for at in (0, -1))
    records = records_of(
        arrival_s=sent_s if closed else workload.arrival_s, prompt_tokens=workload.prompt_tokens,
        output_tokens=np.array([row["output_tokens"] for row in rows]), tokens=tokens, name=workload.name,
        status=np.where(finished, Status.FINISHED, Status.UNFINISHED), first_token_s=first_s, finished_s=last_s,
        end_s=float(report["end_s"]),
    )  # fmt: skip
    steps = np.array(report["steps"], dtype=np.float64).reshape(len(report["steps"]), -1)
    column = dict(zip(report["step_columns"], steps.T, strict=True))
    none = np.zeros(len(steps), dtype=np.int64)
    counts = {name: column[name].astype(np.int64) for name in ("decode_seqs", "prefill_seqs", "prefill_tokens")}
    own = StepRecords(column["start_s"], column["end_s"], replica=none, **counts, kv_blocks=none, waiting=none)
    sums = {"steps": len(steps), "tokens": (counts["prefill_tokens"] + counts["decode_seqs"]).sum()}
    sums |= {"attention_pairs": column["pairs"].sum(), "busy_s": (column["end_s"] - column["start_s"]).sum()}
    totals = replace(records.totals, **{name: np.array([total]) for name, total in sums.items()})
    late_s = 0.0 if closed else float(np.max(sent_s - workload.arrival_s))
    errors, run_metadata = Counter(failed), {**metadata, "latest_send_s": late_s}
    records = replace(records, steps=own, totals=totals)
    return RunResult(records, workload, BENCH, run_metadata, errors=dict(errors), tokens=tokens)
