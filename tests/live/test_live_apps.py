"""Applications on real vLLMs: run, killed, interrupted and resumed; the answers are the same to the byte."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lengthwise.apps.ledger import State, open_ledger

pytestmark = [pytest.mark.engine, pytest.mark.slow]

RUNNER = Path(__file__).with_name("app_runner.py")


@pytest.fixture(scope="module")
def commands(tmp_path_factory, engine_python, tiny):
    """A file of what starts an engine of each model: two sizes, on a thread each."""
    import _vllm

    from lengthwise.gateway.demo.engines import ONE_PROCESS

    folder = tmp_path_factory.mktemp("models")
    written = {}
    (folder / "writer").symlink_to(tiny)
    for model in (folder / "writer", _vllm.make_model(folder / "critic", "small")):
        words = [engine_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", "{port}"]
        words += ["--served-model-name", "m", "--host", "{host}", "--dtype", "float32", "--enforce-eager"]
        words += ["--max-model-len", "1024", "--max-num-seqs", "4", "--generation-config", "vllm"]
        words += ["--distributed-executor-backend", ONE_PROCESS]
        written[model.name] = " ".join(words)
    (folder / "commands.json").write_text(json.dumps(written))
    return folder / "commands.json"


def environment(models):
    import _vllm

    cache = (models / "writer").resolve().parent / "cache"
    return {**os.environ, **_vllm.QUIET, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CACHE_ROOT": str(cache)}


def started(folder, commands):
    folder.mkdir(exist_ok=True)
    words = [sys.executable, str(RUNNER), str(folder), str(commands)]
    return subprocess.Popen(words, env=environment(commands.parent), stdout=subprocess.PIPE, text=True)


def finished(process):
    out, _ = process.communicate(timeout=400)
    return process.returncode, json.loads(out.splitlines()[-1])


def until_done(folder, count, process):
    """Returns once so many tasks are done."""
    end = time.monotonic() + 300
    while time.monotonic() < end:
        assert process.poll() is None, "it ended before it could be disturbed"
        if (folder / "ledger.sqlite").exists():
            with open_ledger(folder, read_only=True) as ledger:
                if sum(n for (_, state), n in ledger.counts().items() if state == State.DONE) >= count:
                    return
        time.sleep(0.05)
    pytest.fail(f"{count} tasks were not done in time")


def engines_of(commands):
    """Engines of these models that run."""
    reported = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in reported.splitlines() if str(commands.parent) in line and "app_runner" not in line]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, commands):
    folder = tmp_path_factory.mktemp("apps") / "undisturbed"
    code, reported = finished(started(folder, commands))
    assert code == 0
    assert reported["counts"] == {"DONE": 12 + 4 * 6}
    return reported["files"], (folder / "out" / "outputs.jsonl").read_bytes()


def test_all_tasks_are_answered_in_the_order_of_the_inputs(undisturbed):
    lines = [json.loads(line) for line in undisturbed[1].splitlines()]
    assert len(lines) == 36
    assert [int(one["id"]) for one in lines] == sorted(int(one["id"]) for one in lines)
    assert all(one["output_tokens"] == 160 and one["finish_reason"] == "length" for one in lines)


def test_a_run_that_is_killed_and_interrupted_ends_with_the_same_bytes(tmp_path, commands, undisturbed):
    folder = tmp_path / "run"
    for tasks, number, code in ((9, signal.SIGKILL, -9), (18, signal.SIGINT, 130)):
        process = started(folder, commands)
        until_done(folder, tasks, process)
        process.send_signal(number)
        process.communicate(timeout=120)
        assert process.returncode == code
        end = time.monotonic() + 60
        while engines_of(commands) and time.monotonic() < end:
            time.sleep(0.2)
        assert not engines_of(commands), "engines outlive their coordinator"
    last, reported = finished(started(folder, commands))
    assert last == 0
    assert reported["files"] == undisturbed[0]
    written = (folder / "out" / "outputs.jsonl").read_bytes()
    assert written == undisturbed[1]
    assert hashlib.sha256(written).hexdigest() == reported["files"]["outputs.jsonl"]
