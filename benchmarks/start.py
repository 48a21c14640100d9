"""What a user waits for before the first answer: import, a warm command, a wrong name, the first compilation.

``machine_pace`` is the CPU time of a plain Python loop: compare figures of two machines or days relative to it.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _harness import cpu_seconds, fresh_process, machine, python_loop, summary
from _sections import Sections

SCENARIO = """
workload = {preset = "chat-1m", num_requests = 1000, request_rate = 3.0}
deployment = {model = "llama-2-70b", gpu = "A100-80GB", tp = 4}
engine = {max_num_batched_tokens = 512}
run = {seeds = 1}
"""
IMPORT = "import time; t = time.perf_counter(); import lengthwise; print(time.perf_counter() - t)"
COMPILE = """
import time
from lengthwise import engine
start_s = time.process_time()
engine.warm_up()
assert engine.ready()
print(time.process_time() - start_s)
"""


def command_s(repeats: int, model: str, *, expected: str, fails: bool = False) -> list[float]:
    """Return CPU seconds of processes of ``lengthwise simulate``, the kernel in the cache, that print ``expected``."""
    seconds = []
    # Warm includes Python's byte code, which exists after any first run.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as scratch:
        (scenario := Path(scratch) / "s.toml").write_text(SCENARIO)
        words = ["simulate", str(scenario), "--set", f"deployment.model={model}", "--json", "-"]
        for _ in range(repeats + 1):
            before_s = sum(os.times()[2:4])  # of child processes
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            command = [sys.executable, "-m", "lengthwise.cli", *words]
            done = subprocess.run(command, env=environment, **pipes, check=False)
            seconds.append(sum(os.times()[2:4]) - before_s)
            assert (done.returncode != 0) == fails, done.stdout
            assert expected in done.stdout, done.stdout
    return seconds[1:]


def figures(_shared: Path, quick: bool) -> dict[str, Any]:
    """Return the seconds of each start, and ``machine_pace``; a quick run compiles nothing."""
    repeats = 3 if quick else 7
    with tempfile.TemporaryDirectory() as scratch:
        seconds = {
            "import_s": [fresh_process(IMPORT) for _ in range(repeats)],
            "warm.simulate_1000_s": command_s(repeats, "llama-2-70b", expected='"finished"'),
            "start.typo_s": command_s(repeats, "llama-2-70", expected="llama-2-70b", fails=True),
            "cold.compile_s": [] if quick else [fresh_process(COMPILE, LENGTHWISE_CACHE_DIR=scratch)],
            "machine_pace": cpu_seconds(python_loop, 21),
        }
    return {name: summary(of) | {"unit": "s", "machine": machine()} for name, of in seconds.items() if of}


SECTIONS = Sections("start", __doc__, {"start": "start"})

if __name__ == "__main__":
    SECTIONS.main()
