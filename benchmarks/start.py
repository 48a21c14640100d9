"""What a user waits for before the first answer: import, a warm command, the first compile."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _harness import Row, arguments, fresh_process, machine, show

SCENARIO = """
[workload]
preset = "chat-1m"
num_requests = 1000
request_rate = 3.0
[deployment]
model = "llama-2-70b"
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


def import_time(repeats: int) -> Row:
    seconds = [fresh_process(IMPORT)["out"] for _ in range(repeats)]
    details = {"machine": machine()}
    return Row("import_s", statistics.median(seconds), "s", 0.15, "lower", (min(seconds), max(seconds)), details)


def warm_simulate(repeats: int) -> Row:
    """`lengthwise simulate` of 1,000 requests as a whole process, the kernel in the cache."""
    seconds = []
    with tempfile.TemporaryDirectory() as scratch:
        scenario, out = Path(scratch) / "s.toml", Path(scratch) / "out.json"
        scenario.write_text(SCENARIO)
        command = [sys.executable, "-m", "lengthwise.cli", "simulate", str(scenario), "--json", str(out)]
        # Warm means that Python's own byte code is there, too, as it is after any first run.
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        for i in range(repeats + 1):
            start = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True, env=environment)
            if i > 0:
                seconds.append(time.perf_counter() - start)
            assert '"finished"' in out.read_text()
    middle, spread = statistics.median(seconds), (min(seconds), max(seconds))
    return Row("warm.simulate_1000_s", middle, "s", 1.5, "lower", spread, {"machine": machine()})


def cold_compile() -> Row:
    """CPU seconds, which on a quiet core are the wall's."""
    with tempfile.TemporaryDirectory() as scratch:
        out = fresh_process(COMPILE, LENGTHWISE_CACHE_DIR=scratch)["out"]
    return Row("cold.compile_s", out["cpu_s"], "s", 40.0, "lower", None, {**out, "machine": machine()})


def main() -> None:
    args = arguments(__doc__ or "")
    repeats = 3 if args.fast else 7
    show([import_time(repeats), warm_simulate(repeats), cold_compile()], as_json=args.json)


if __name__ == "__main__":
    main()
