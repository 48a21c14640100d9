"""The tiny example applications on real vLLMs: planned, run, killed and gone on with, to the same bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from lengthwise.apps.launch.local import EngineTimeouts, Process
from lengthwise.apps.ledger import FINISHED, State, open_ledger
from lengthwise.config.app_file import load_app, read_plan
from lengthwise.schema.app import ModelPlan

pytestmark = [pytest.mark.engine, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "examples" / "apps"
LOCAL = "chain-summary-tiny"
"""Run on engines of its own, too: the plan's, which come and go with it."""
TINY = ("ensemble-tiny", LOCAL, "routing-tiny", "mixed-tiny", "critique-tiny")
MODELS = ("alder", "birch", "cedar")
HOST = "127.0.0.1"


def example(name):
    return EXAMPLES / f"{name}.toml"


@pytest.fixture(scope="module")
def weights(tmp_path_factory, engine_python, tiny):
    """--set of what each model loads, and the engine's python as the one that is found first."""
    folder = tmp_path_factory.mktemp("models")
    words = [engine_python, str(EXAMPLES / "make_models.py"), str(folder)]
    subprocess.run(words, check=True, capture_output=True, timeout=300)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{Path(engine_python).parent}{os.pathsep}{os.environ['PATH']}")
        patch.setenv("VLLM_CACHE_ROOT", str(tiny.parent / "cache"))
        yield {name: f"models.{name}.weights={folder / name}" for name in MODELS}


@pytest.fixture(scope="module")
def urls(tmp_path_factory, weights):
    """--set of the addresses of an engine of each model, started by the examples' own command and shared by all."""
    logs = tmp_path_factory.mktemp("logs")
    file = load_app(example("mixed-tiny"), list(weights.values()))
    limits = EngineTimeouts(ready_s=600.0, grace_s=5.0)

    def process(loaded):
        def launch(port):
            return loaded.launch(ModelPlan(0, "core"), (0,), HOST, port, None)

        return Process(launch, logs / f"{loaded.name}.log", limits, HOST)

    engines = {loaded.name: process(loaded) for loaded in file.loaded}
    assert set(engines) == set(MODELS)
    with ExitStack() as stack, ThreadPoolExecutor(len(engines)) as pool:
        for engine in engines.values():
            stack.callback(engine.stop_blocking)
        started = pool.map(Process.start_blocking, engines.values())
        yield {name: f"run.engines.{name}.urls=['{url}']" for name, url in zip(engines, started, strict=True)}


def command(verb, name, *sets):
    """The command line, for the models that the example has."""
    own = {model.name for model in load_app(example(name)).app.models}
    used = [text for some in sets for model, text in some.items() if model in own]
    changes = [word for text in used for word in ("--set", text)]
    return [sys.executable, "-m", "lengthwise.cli", "app", verb, str(example(name)), *changes]


def finished(words):
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def killed_half_way(words, folder, tasks):
    """Begins a run and kills it once so many tasks are done."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 240
    while done_of(folder) < tasks:
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < end, "it did not come to be half done"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -9
    with open_ledger(folder, read_only=True) as ledger:
        left = sum(n for (_, state), n in ledger.counts().items() if state not in FINISHED)
    assert left, "nothing was left to do"


def done_of(folder):
    if not (folder / "ledger.sqlite-wal").exists():
        return 0  # the file is there before its tables, its log after them
    with open_ledger(folder, read_only=True) as ledger:
        return sum(n for (_, state), n in ledger.counts().items() if state == State.DONE)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, weights, urls):
    """What each example answers on the shared engines, asked when needed."""
    known = {}

    def of(name):
        if name not in known:
            folder = tmp_path_factory.mktemp("undisturbed") / name
            finished([*command("run", name, weights, urls), "--launcher", "static", "--out", str(folder)])
            known[name] = (folder / "outputs.jsonl").read_bytes()
        return known[name]

    return of


@pytest.mark.parametrize("name", TINY)
def test_an_example_that_was_killed_goes_on_and_ends_with_the_same_bytes(tmp_path, weights, urls, undisturbed, name):
    finished([*command("plan", name, weights), "--no-what-if", "--json", str(tmp_path / "plan.json"), "--quiet"])
    assert read_plan(tmp_path / "plan.json").stages
    complete = undisturbed(name)
    lines = [json.loads(line) for line in complete.splitlines()]
    assert all(one["output_tokens"] > 0 for one in lines)
    words = [*command("run", name, weights, urls), "--launcher", "static", "--out", str(tmp_path / "run")]
    killed_half_way(words, tmp_path / "run", len(lines) // 4)
    finished([*words, "--resume"])
    assert (tmp_path / "run" / "outputs.jsonl").read_bytes() == complete
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["how"] == "done"


def test_on_the_plans_own_engines_it_is_the_same(tmp_path, weights, undisturbed):
    plan, folder = tmp_path / "plan.json", tmp_path / "run"
    finished([*command("plan", LOCAL, weights), "--no-what-if", "--json", str(plan), "--quiet"])
    words = [*command("run", LOCAL, weights), "--plan", str(plan), "--out", str(folder)]
    killed_half_way(words, folder, 4)
    finished([*words, "--resume"])
    assert (folder / "outputs.jsonl").read_bytes() == undisturbed(LOCAL)
    assert sorted(path.name.split("-")[0] for path in (folder / "logs").glob("*.log"))
