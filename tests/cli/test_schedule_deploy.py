"""lengthwise schedule --deploy: folders that say how a schedule is run, and that can be read back."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest

from lengthwise import config
from lengthwise.gateway.plugin.settings import RraSettings
from lengthwise.gateway.plugin.vllm_adapter import TESTED
from lengthwise.schedule import EngineShape, Runnable
from lengthwise.schema.errors import InputError
from lengthwise.usecases import schedule, schedule_launch, schedule_plan
from lengthwise.usecases.schedule_launch import phase_steps, plugin_limitation
from lengthwise.usecases.schedule_run import split_in_flight

TEXT = """
name = "small"
[workload]
prompt = {{ kind = "uniform", low = 200, high = 900 }}
output = {{ kind = "uniform", low = 1, high = 9 }}
request_rate = 1
[deployment]
model = "opt-13b"
gpu = "A40"
node = "pcie4-4"
tp = {gpus}
[engine]
gpu_memory_utilization = 0.7
[schedule]
latency_bound = "{bound}"
strategies = ["{strategy}"]
"""


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """Hold the folders that tests have written: each question is planned once."""
    return tmp_path_factory.mktemp("plans"), {}


@pytest.fixture
def deployed(cli, tmp_path, plans):
    """Return (folder, printed text) of a scenario with so many GPUs."""
    copies, known = plans

    def made(strategy, gpus=2, bound="3s", *words):
        path, folder = tmp_path / "small.toml", tmp_path / "launch"
        path.write_text(TEXT.format(gpus=gpus, bound=bound, strategy=strategy))
        question = (strategy, gpus, bound, *(word for word in words if word != "--force"))
        if question not in known:
            finished = cli("schedule", path, "--deploy", folder, *words)
            assert finished.code == 0, finished.err
            known[question] = (shutil.copytree(folder, copies / str(len(known))), finished.out)
        else:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(known[question][0], folder)
        return folder, known[question][1]

    return made


def command(script):
    """The words of the one command that a script starts vLLM with."""
    text = re.sub(r"\\\n\s*", " ", script.read_text())
    (line,) = re.findall(r"exec (vllm serve .*)", text)
    return shlex.split(line)


def after(words, flag):
    return words[words.index(flag) + 1]


def test_phases_are_passed_to_the_gateway_to_vllm_and_to_the_runner(deployed):
    folder, _ = deployed("rra")
    plan = json.loads((folder / "PLAN.json").read_text())["chosen"]
    reported = config.load_gateway(folder / "gateway.toml").config
    phases = reported.dispatch.phases
    assert reported.order.mode == "rra"
    assert (phases.prefill_batch, phases.decode_steps) == (plan["prefill_batch"], plan["decode_steps"])
    run = schedule_plan.planned_run(config.load(folder / "scenario.toml"), folder / "PLAN.json")
    assert run.phases.max_requests == phases.max_requests
    assert int(after(command(folder / "vllm.sh"), "--max-num-seqs")) == phases.max_requests
    cut = "--pipeline-parallel-size" if plan["tp_groups"] == 0 else "--tensor-parallel-size"
    assert after(command(folder / "vllm.sh"), cut) == "2"


def test_one_stage_keeps_phases_inside_vllm(deployed):
    folder, _ = deployed("rra", 1)
    words = command(folder / "vllm-phases.sh")
    assert after(words, "--scheduler-cls") == "lengthwise.gateway.plugin.RraScheduler"
    inside = json.loads(after(words, "--additional-config"))["lengthwise"]
    plan = json.loads((folder / "PLAN.json").read_text())["chosen"]
    assert (inside["prefill_batch"], inside["decode_steps"]) == (plan["prefill_batch"], plan["decode_steps"])


def test_the_readme_states_where_vllm_keeps_phases_itself_and_its_fallback(deployed):
    folder, _ = deployed("rra", 1)
    flat = " ".join((folder / "README.md").read_text().split())
    assert f"- vLLM {' or '.join(TESTED)}: the class is tested on no other" in flat
    assert 'its log contains "keeps its own schedule" and the reason' in flat
    assert "Then nothing runs the phases: use the gateway" in flat
    assert "`lengthwise schedule run` (above) with `--adapt` does so while it serves" in flat


@pytest.mark.parametrize(("strategy", "gpus", "bound"), [("rra", 1, "3s"), ("waa-m", 4, "4s")])
def test_the_readme_states_how_often_the_bound_holds_if_the_tables_are_off(deployed, strategy, gpus, bound):
    """Of the choice, or of what is run instead."""
    folder, _ = deployed(strategy, gpus, bound)
    (spread,) = json.loads((folder / "PLAN.json").read_text())["spreads"]
    assert spread["draws"] >= 100
    text = (folder / "README.md").read_text()
    assert f"**the bound holds in {100 * spread['met_share']:.0f} % of the draws**" in text


def test_phases_that_vllm_does_not_keep_are_kept_by_the_gateway_with_the_reason(deployed):
    folder, _ = deployed("rra", 1)
    run = schedule_plan.planned_run(config.load(folder / "scenario.toml"), folder / "PLAN.json")
    reason = plugin_limitation(Runnable(run.row, 1, EngineShape(1, 2)))
    assert "this schedule has 2 pipeline stages" in reason
    steps = phase_steps(reason)
    assert "vllm-phases.sh" not in steps
    assert f"cannot run these phases: {reason}. The gateway runs them from outside" in steps
    assert plugin_limitation(Runnable(run.row, 1, EngineShape(2))) == ""


@pytest.mark.parametrize("strategy", ["rra", "waa-c"])
def test_what_vllm_does_not_serve_is_planned_but_not_written(cli, tmp_path, strategy):
    path, folder = tmp_path / "small.toml", tmp_path / "launch"
    path.write_text(TEXT.format(gpus=2, bound="9s", strategy=strategy))
    words = ("schedule", path, "--set", "deployment.model=t5-11b", "--set", "run.model_draws=0")
    refused = cli(*words, "--deploy", folder)
    assert refused.code == 2
    assert "t5-11b has an encoder" in refused.err
    assert "Leave out --deploy" in refused.err
    assert not folder.exists()
    assert cli(*words).code == 0, "the plan itself stays"
    requested = config.load(path, ["deployment.model=t5-11b", "run.model_draws=0"])
    with pytest.raises(InputError, match="has an encoder"):
        schedule_launch.write_schedule_launch(requested, schedule.plan_schedule(requested), folder)


def test_a_threshold_is_planned_with_and_passed_to_all_that_run_it(deployed):
    plain, _ = deployed("rra", 1)
    before = json.loads((plain / "PLAN.json").read_text())
    assert before["threshold"] is None
    folder, _ = deployed("rra", 1, "3s", "--threshold", "0.05", "--force")
    plan = json.loads((folder / "PLAN.json").read_text())
    assert plan["threshold"] == 0.05
    assert plan["chosen"]["throughput_rps"] > before["chosen"]["throughput_rps"]
    phases = config.load_gateway(folder / "gateway.toml").config.dispatch.phases
    assert phases.threshold == 0.05
    reported = json.loads(after(command(folder / "vllm-phases.sh"), "--additional-config"))
    inside = RraSettings(**reported["lengthwise"])
    assert inside.threshold == 0.05
    assert inside.prompt_tokens == pytest.approx(550 * phases.prefill_batch, abs=1)
    assert inside.decode_batch == pytest.approx(phases.decode_batch, abs=0.5)
    run = schedule_plan.planned_run(config.load(folder / "scenario.toml"), folder / "PLAN.json")
    for name, value in asdict(phases).items():
        expected = value if name == "decode_batch" or not isinstance(value, float) else pytest.approx(value)
        assert name == "decode_batch" or getattr(run.phases, name) == expected, name
    other = schedule_plan.planned_run(config.load(folder / "scenario.toml"), folder / "PLAN.json", threshold=0.2)
    assert other.phases.threshold == 0.2


def test_an_evenly_planned_split_notes_that_vllm_does_not_keep_it(deployed):
    folder, _ = deployed("waa-c", 2, "3s", "--threshold", "0.05")
    assert "within the threshold" in (folder / "README.md").read_text()


def test_a_split_becomes_a_producer_a_consumer_and_a_router(deployed):
    folder, _ = deployed("waa-c")
    roles = {}
    for side in ("prefill", "decode"):
        words = command(folder / f"{side}.sh")
        roles[side] = json.loads(after(words, "--kv-transfer-config"))
    assert roles["prefill"] == {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
    assert roles["decode"] == {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}
    assert "serve 0 8100 5600" in (folder / "prefill.sh").read_text()
    assert "serve 1 8200 5700" in (folder / "decode.sh").read_text()
    router = (folder / "router.sh").read_text()
    assert "PREFILLS:-'http://127.0.0.1:8100'" in router
    assert "DECODES:-'http://127.0.0.1:8200'" in router
    plan = json.loads((folder / "PLAN.json").read_text())["chosen"]
    in_use = config.load_gateway(folder / "gateway.toml").config.engines[0].concurrency
    assert in_use >= plan["decode_batch"] + plan["prefill_batch"]
    planned = schedule_plan.planned_run(config.load(folder / "scenario.toml"), folder / "PLAN.json")
    assert planned.phases is None
    assert in_use == split_in_flight(planned.row)
    assert f"at most {in_use} at a time" in " ".join((folder / "README.md").read_text().split())


def test_an_unrunnable_choice_becomes_the_nearest_runnable_with_its_own_numbers(deployed):
    """Three GPUs under WAA have two stages on a side, which vLLM's hand-over does not take."""
    folder, out = deployed("waa-m", 4, "4s")
    reported = json.loads((folder / "PLAN.json").read_text())
    assert "Engines cannot run" in out
    assert "Engines cannot run" in (folder / "README.md").read_text()
    assert reported["chosen"]["latency_high_s"] <= 4
    assert "Engines cannot run" in reported["answer"][0]
    assert tomllib.loads((folder / "gateway.toml").read_text())


@pytest.mark.parametrize("strategy", ["rra", "waa-c"])
def test_scripts_are_shell(deployed, strategy):
    folder, _ = deployed(strategy)
    scripts = sorted(folder.glob("*.sh"))
    assert scripts
    for script in scripts:
        assert subprocess.run(["sh", "-n", script], check=False).returncode == 0, script
        assert script.stat().st_mode & 0o100


def test_existing_files_are_not_overwritten(cli, deployed, tmp_path):
    folder, _ = deployed("rra")
    (folder / "README.md").write_text("own")
    refused = cli("schedule", tmp_path / "small.toml", "--deploy", folder)
    assert refused.code == 2
    assert "--force" in refused.err
    assert (folder / "README.md").read_text() == "own"
    assert cli("schedule", tmp_path / "small.toml", "--deploy", folder, "--force").code == 0
    assert (folder / "README.md").read_text() != "own"


def test_a_file_is_no_folder(cli, deployed, tmp_path):
    deployed("rra")
    refused = cli("schedule", tmp_path / "small.toml", "--deploy", tmp_path / "small.toml")
    assert (refused.code, Path(tmp_path / "small.toml").is_file()) == (2, True)
