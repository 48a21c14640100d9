"""What a user waits for before the first answer: import, a warm command, a wrong name, an installation, a first run.

``start.first_run_s`` and ``start.first_ui_s`` are wall seconds with an empty cache, in which processes share the cores.

``wheel.install_s`` installs the wheel with the extras ``report`` and ``ui`` into an empty environment, from uv's cache.
``docs.broken_links`` counts links and anchors of the built documentation site that lead nowhere.

``machine_pace`` is the CPU time of a plain Python loop: compare figures of two machines or days relative to it.
"""

import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from _harness import cpu_seconds, fresh_process, machine, python_loop, summary
from _sections import Sections

from lengthwise import _jit, engine
from lengthwise.backend.process import free_port

ROOT = Path(__file__).parents[1]
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
        words = ["-m", "lengthwise.cli", "simulate", str(scenario), "--set", f"deployment.model={model}", "--json", "-"]
        for _ in range(repeats + 1):
            before_s = sum(os.times()[2:4])  # of child processes
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            done = subprocess.run([sys.executable, *words], env=environment, **pipes, check=False)
            seconds.append(sum(os.times()[2:4]) - before_s)
            assert (done.returncode != 0) == fails, done.stdout
            assert expected in done.stdout, done.stdout
    return seconds[1:]


def first_answer_s(answer: Callable[[], None]) -> float:
    """Return the wall seconds of an answer with an empty cache; the kernel is then compiled in the background."""
    with tempfile.TemporaryDirectory() as scratch, mock.patch.dict(os.environ, LENGTHWISE_CACHE_DIR=scratch):
        for name in ("CI", "LENGTHWISE_COMPILE", "PYTHONDONTWRITEBYTECODE"):
            os.environ.pop(name, None)
        start_s = time.perf_counter()
        answer()
        seconds = time.perf_counter() - start_s
        assert not engine.ready(), "the answer did not come before the kernel"
        while not engine.ready() and seconds < 600:
            time.sleep(0.5)
        with _jit.compile_lock(wait_s=600):  # until the background process has written its last file
            assert engine.ready()
    return seconds


def ui_answers() -> None:
    """Start the planner and let it answer the page's first question."""
    url = f"http://127.0.0.1:{(port := free_port())}/answers/plan/answer"
    request = urllib.request.Request(url, b"{}", {"Content-Type": "application/json"})
    command = [sys.executable, "-m", "lengthwise.cli", "ui", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            while server.poll() is None:
                try:
                    with urllib.request.urlopen(request) as response:
                        assert json.load(response)["cards"]
                        return
                except urllib.error.HTTPError:
                    raise
                except (ConnectionError, urllib.error.URLError):
                    time.sleep(0.05)
            raise RuntimeError("the planner ended before its first answer")
        finally:
            server.terminate()


def figures(_shared: Path, quick: bool) -> dict[str, Any]:
    """Return the seconds of each start, and ``machine_pace``; a quick run compiles nothing."""
    repeats = 3 if quick else 7
    with tempfile.TemporaryDirectory() as scratch:
        seconds = {
            "import_s": [fresh_process(IMPORT) for _ in range(repeats)],
            "warm.simulate_1000_s": command_s(repeats, "llama-2-70b", expected='"finished"'),
            "start.typo_s": command_s(repeats, "llama-2-70", expected="llama-2-70b", fails=True),
            "machine_pace": cpu_seconds(python_loop, 21),
        }
        if not quick:
            seconds["cold.compile_s"] = [fresh_process(COMPILE, LENGTHWISE_CACHE_DIR=scratch)]
            answers = {"run": lambda: command_s(0, "llama-2-70b", expected='"finished"'), "ui": ui_answers}
            seconds |= {f"start.first_{name}_s": [first_answer_s(of) for _ in range(3)] for name, of in answers.items()}
    return {name: summary(of) | {"unit": "s", "machine": machine()} for name, of in seconds.items()}


def run(*words: object, cwd: Path) -> None:
    subprocess.run([str(word) for word in words], cwd=cwd, check=True, stdout=subprocess.DEVNULL)


def wheel(_shared: Path, quick: bool) -> dict[str, Any]:
    """Return the size of the wheel, and the seconds of its installation; nothing in a quick run."""
    if quick:
        return {}
    uv, seconds = [sys.executable, "-m", "uv", "--quiet"], []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        run(*uv, "build", "--wheel", "--out-dir", folder, ROOT, cwd=folder)
        (made,) = folder.glob("*.whl")
        for at in range(4):  # the first one fills uv's cache
            run(*uv, "venv", "--python", sys.executable, folder / f"{at}", cwd=folder)
            start_s = time.perf_counter()
            run(*uv, "pip", "install", "--python", folder / f"{at}", f"{made}[report,ui]", cwd=folder)
            seconds.append(time.perf_counter() - start_s)
        size_mb = made.stat().st_size / 1e6
    install_s = summary(seconds[1:]) | {"unit": "s", "first_s": seconds[0], "machine": machine()}
    return {"wheel.size_mb": size_mb, "wheel.install_s": install_s}


def site(_shared: Path, quick: bool) -> dict[str, Any]:
    """Return the number of broken links of the documentation site; nothing in a quick run."""
    if quick:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "mkdocs", "build", "--no-strict", "--site-dir", folder, cwd=ROOT)
        pages, broken = runpy.run_path(str(ROOT / "tools/site.py"))["broken_links"](Path(folder))
    return {"docs.broken_links": {"value": len(broken), "pages": pages, "broken": broken[:20]}}


SECTIONS = Sections("start", __doc__)

if __name__ == "__main__":
    SECTIONS.main()
