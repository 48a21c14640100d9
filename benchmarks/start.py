"""What a user waits for before the first answer: import, a warm command, a wrong name, the first compilation.

``machine_pace`` is the CPU time of a fixed plain Python loop: compare figures of two machines, or of two days, only
relative to it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import _harness as harness
from _harness import Row, fresh_process

SCENARIO = """
[workload]
preset = "chat-1m"
num_requests = 1000
request_rate = 3.0
[deployment]
model = "{model}"
gpu = "A100-80GB"
tp = 4
[engine]
max_num_batched_tokens = 512
[run]
seeds = 1
"""

IMPORT = "import time; t = time.perf_counter(); import lengthwise; print(time.perf_counter() - t)"
COMPILE = """
import json, time
from lengthwise import engine
assert not engine.ready()
start, cpu = time.perf_counter(), time.process_time()
engine.warm_up()
print(json.dumps(dict(wall_s=time.perf_counter() - start, cpu_s=time.process_time() - cpu)))
assert engine.ready()
"""


def row(name: str, seconds: list[float], target: float) -> Row:
    """Return a figure of repeats with the machine's pace at the time."""
    found, (pace_s, _) = harness.summary(seconds), harness.best_cpu_s(harness.python_loop, 7)
    details = {"machine": harness.machine(), "machine_pace_s": pace_s}
    return Row(name, found["value"], "s", target, "lower", found["ci"], details)


def command_cpu_s(repeats: int, model: str, check: Callable[[int, str, Path], bool]) -> list[float]:
    """Return CPU seconds of complete processes of ``lengthwise simulate``, the kernel in the cache."""
    seconds = []
    with tempfile.TemporaryDirectory() as scratch:
        scenario, out = Path(scratch) / "s.toml", Path(scratch) / "out.json"
        scenario.write_text(SCENARIO.format(model=model))
        command = [sys.executable, "-m", "lengthwise.cli", "simulate", str(scenario), "--json", str(out)]
        # Warm includes Python's byte code, which exists after any first run.
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        for _ in range(repeats + 1):
            done, cpu_s, _ = harness.child_process(command, environment, check=False)
            assert check(done.returncode, done.stderr, out), done.stderr
            seconds.append(cpu_s)
    return seconds[1:]


def main() -> None:
    """Measure and print all figures."""
    args = harness.arguments((__doc__ or "").splitlines()[0])
    repeats = 3 if args.quick else 7
    imports = [fresh_process(IMPORT)["out"] for _ in range(repeats)]
    warm = command_cpu_s(repeats, "llama-2-70b", lambda code, _, out: code == 0 and '"finished"' in out.read_text())
    typo = command_cpu_s(repeats, "llama-2-70", lambda code, text, _: code != 0 and "llama-2-70b" in text)
    with tempfile.TemporaryDirectory() as scratch:
        compiled = fresh_process(COMPILE, LENGTHWISE_CACHE_DIR=scratch)["out"]["cpu_s"]
    pace_s, all_s = harness.best_cpu_s(harness.python_loop, 21)
    pace = Row(
        "machine_pace", pace_s, "s", float("nan"), "lower", (min(all_s), max(all_s)), {"rounds": harness.LOOP_ROUNDS}
    )
    rows = [
        row("import_s", imports, 0.15),
        row("warm.simulate_1000_s", warm, 1.5),
        row("start.typo_s", typo, 0.5),
        row("cold.compile_s", [compiled], 40.0),
        pace,
    ]
    harness.show(rows, as_json=args.json)


if __name__ == "__main__":
    main()
