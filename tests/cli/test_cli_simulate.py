"""``lengthwise simulate`` and ``lengthwise explain`` on good input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lengthwise import config, engine
from lengthwise.cli import outputs
from lengthwise.cli.simulate import variant_files
from lengthwise.schema.errors import OutputError
from lengthwise.usecases import explain, simulate, variants
from lengthwise.usecases.simulate import ineffective_options

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_simulate_prints_both_variants_and_nothing_else(cli, scenario_file):
    finished = cli("simulate", scenario_file)
    assert finished.code == 0
    for words in ("Two schedulers", "one", "Two, too", "TTFT", "JCT"):
        assert words in finished.out
    assert "Traceback" not in finished.err


def test_quiet_prints_nothing(cli, scenario_file):
    assert cli("simulate", scenario_file, "--quiet") == (0, "", "")


def test_files_are_written_where_requested_and_reported(cli, scenario_file, tmp_path):
    html, out, trace = tmp_path / "r.html", tmp_path / "r.json", tmp_path / "t.json"
    finished = cli("simulate", scenario_file, "--report", html, "--json", out, "--timeline", trace)
    assert finished.code == 0
    for path in (html, out, trace, tmp_path / "t-two-too.json"):
        assert f"wrote {path}" in finished.err
    assert "<html" in html.read_text("utf-8").lower()
    names = [result["name"] for result in json.loads(out.read_text("utf-8"))["results"]]
    assert names == ["one", "Two, too"]
    assert json.loads(trace.read_text("utf-8"))["traceEvents"]


def test_records_of_each_variant_hold_its_first_run(cli, scenario_file, tmp_path):
    from lengthwise import measure

    finished = cli("simulate", scenario_file, "--records", tmp_path / "r.parquet")
    assert finished.code == 0
    runs = {name: measure.read_records(tmp_path / f"r-{name}.parquet") for name in ("one", "two-too")}
    assert not (tmp_path / "r.parquet").exists()
    outcomes = simulate.run(scenario_file)
    for run, outcome in zip(runs.values(), outcomes, strict=True):
        assert run.is_simulated
        assert (run.records.requests.finished_s == outcome.records.requests.finished_s).all()
        assert (run.workload.output_tokens == outcome.variant.workload(0).output_tokens).all()
        assert config.loads(run.metadata["scenario"]).deployment.model == "llama-3-8b"


def test_the_scenario_in_the_json_gives_the_same_numbers_again(cli, scenario_file, tmp_path):
    cli("simulate", scenario_file, "--json", tmp_path / "a.json", "--quiet")
    first = json.loads((tmp_path / "a.json").read_text("utf-8"))["results"][1]
    (tmp_path / "again.toml").write_text(first["scenario"], "utf-8")
    cli("simulate", tmp_path / "again.toml", "--json", tmp_path / "b.json", "--quiet")
    second = json.loads((tmp_path / "b.json").read_text("utf-8"))["results"][0]
    assert second == first


def test_seeds_from_the_command_line_win_over_the_file(cli, scenario_file, tmp_path):
    cli("simulate", scenario_file, "--seeds", 3, "--set", "run.seeds=2", "--json", tmp_path / "a.json", "--quiet")
    results = json.loads((tmp_path / "a.json").read_text("utf-8"))["results"]
    assert [result["summary"]["seeds"] for result in results] == [[0, 1, 2]] * 2


def test_jobs_change_nothing_but_the_time(cli, scenario_file, tmp_path):
    for jobs in (1, 4):
        out = tmp_path / f"{jobs}.json"
        assert cli("simulate", scenario_file, "--seeds", 4, "--jobs", jobs, "--json", out, "--quiet").code == 0
    assert (tmp_path / "1.json").read_bytes() == (tmp_path / "4.json").read_bytes()


def test_run_gives_the_outcome_of_each_variant_and_counts_them(scenario_file):
    calls = []
    outcomes = simulate.run(scenario_file, progress=lambda done, of: calls.append((done, of)))
    in_all = 2 + 2 * 16  # and those behind the model intervals
    assert calls == [(done, in_all) for done in range(in_all + 1)]
    assert [outcome.variant.name for outcome in outcomes] == ["one", "Two, too"]
    again = engine.simulate(outcomes[1].variant.workload(0), outcomes[1].variant.deployment, seed=0)
    assert (again.requests.finished_s == outcomes[1].records.requests.finished_s).all()


def test_variants_see_the_same_requests(scenario_file):
    one, two = simulate.run(scenario_file)
    assert (one.records.requests.arrival_s == two.records.requests.arrival_s).all()
    assert (one.records.requests.prompt_tokens == two.records.requests.prompt_tokens).all()


def test_a_users_policy_from_a_file_changes_the_answer(cli, scenario_file, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from lengthwise import policy\n"
        "@policy.rank\ndef longest_prompt(prompt_tokens):\n    return -float(prompt_tokens)\n"
    )
    for name, rank in (("a", "fcfs"), ("b", "mine.py:longest_prompt")):
        arguments = ["--set", f"scheduler.rank={rank}", "--set", "engine.max_num_seqs=2", "--quiet"]
        assert cli("simulate", scenario_file, *arguments, "--json", tmp_path / f"{name}.json").code == 0
    assert (tmp_path / "a.json").read_bytes() != (tmp_path / "b.json").read_bytes()


def test_a_long_prompt_is_rejected_and_reported(cli, scenario_file, tmp_path):
    short = ["--set", "engine.max_model_len=100", "--json", tmp_path / "out.json"]
    finished = cli("simulate", scenario_file, *short)
    assert finished.code == 0
    assert "rejected" in finished.out
    counts = json.loads((tmp_path / "out.json").read_text("utf-8"))["results"][0]["summary"]["counts"]
    assert counts["rejected"] > 0
    assert counts["rejected"] + counts["finished"] == counts["arrivals"] == 40


def test_an_uncompiled_engine_is_announced(cli, scenario_file, monkeypatch):
    monkeypatch.setattr("lengthwise.engine.simulation.ready", lambda: False)
    assert "compiling the simulator (first run only" in cli("simulate", scenario_file).err
    assert cli("simulate", scenario_file, "--quiet").err == ""


def test_ctrl_c_ends_with_130_and_writes_nothing(cli, scenario_file, monkeypatch, tmp_path):
    first, over = threading.Lock(), threading.Event()

    def endless(*_, **__):
        if first.acquire(blocking=False):  # a second Ctrl-C could come when the command has ended
            os.kill(os.getpid(), signal.SIGINT)
        over.wait(60)

    monkeypatch.setattr(engine, "ready", lambda: True)
    monkeypatch.setattr(engine, "simulate", endless)
    try:
        assert cli("simulate", scenario_file, "--json", tmp_path / "out.json") == (130, "", "")
    finally:
        over.set()
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("name", ["trace.toml", "config-json.toml", "closed-loop.yaml"])
def test_examples_run(cli, tmp_path, name):
    few = ["--set", "workload.num_requests=50", "--seeds", 2, "--json", tmp_path / "out.json"]
    assert cli("simulate", EXAMPLES / name, *few).code == 0
    runs = 1 if name == "trace.toml" else 2  # a replay is the same at every seed
    for result in json.loads((tmp_path / "out.json").read_text("utf-8"))["results"]:
        assert result["summary"]["counts"]["finished"] == 50 * runs


@pytest.mark.parametrize(
    ("changes", "seeds"),
    [
        ([], 1),
        (["scheduler.router=random"], 1),
        (["scheduler.router=random", "deployment.replicas=2"], 3),
        (["deployment.decode.router=power_of_two", "deployment.decode.replicas=1"], 1),
        (["deployment.decode.router=power_of_two", "deployment.decode.replicas=2"], 3),
        (["workload.request_rate=5", "workload.num_requests=50"], 3),
    ],
)
def test_seeds_change_nothing_in_a_deterministic_run(cli, tmp_path, changes, seeds):
    (tmp_path / "s.toml").write_text(
        f'workload.trace = "{EXAMPLES / "trace.csv"}"\ndeployment = {{ model = "llama-3-8b", gpu = "H100" }}\n'
    )
    sets = [part for change in changes for part in ("--set", change)]
    finished = cli("simulate", tmp_path / "s.toml", "--seeds", 3, *sets, "--json", tmp_path / "out.json")
    summary = json.loads((tmp_path / "out.json").read_text("utf-8"))["results"][0]["summary"]
    assert finished.code == 0
    assert summary["seeds"] == list(range(seeds))
    assert finished.err.count("a replay is deterministic: further seeds change nothing") == (seeds == 1)


@pytest.mark.parametrize(("requested", "report"), [(300, 0), (301, 1)])
def test_a_replay_longer_than_its_trace_is_reported(cli, requested, report):
    finished = cli("simulate", EXAMPLES / "trace.toml", "--set", f"workload.num_requests={requested}")
    assert finished.code == 0
    assert finished.err.count("num_requests is 301, but the replayed trace has only 300") == report


def test_json_on_standard_output_is_the_only_output(cli, scenario_file, tmp_path):
    finished = cli("simulate", scenario_file, "--json", "-", "--report", tmp_path / "r.html")
    cli("simulate", scenario_file, "--json", tmp_path / "a.json")
    assert finished.code == 0
    assert finished.out == (tmp_path / "a.json").read_text("utf-8")
    assert f"wrote {tmp_path / 'r.html'}" in finished.err
    assert "wrote -" not in finished.err
    assert cli("simulate", scenario_file, "--json", "-", "--quiet").out == finished.out


def test_explain_shows_what_fits_what_it_costs_and_what_binds(cli):
    finished = cli("explain", EXAMPLES / "chat-70b.toml")
    assert (finished.code, finished.err) == (0, "")
    for words in ("llama-2-70b", "weights", "KV cache", "fit at once", "decode attention", "bound by memory"):
        assert words in finished.out


def test_explain_shows_both_sides_and_which_one_binds(cli):
    finished = cli("explain", EXAMPLES / "disaggregated-70b.toml", "--variant", "disaggregated")
    assert (finished.code, finished.err) == (0, "")
    for words in ("4 x H100", "One step of a prefill replica.", "One step of a decode replica; each decoding sequence"):
        assert words in finished.out
    (binding,) = [line for line in finished.out.splitlines() if line.rstrip().endswith("*")]
    assert binding.startswith("prefill side")
    assert "prefill replicas for each decode replica." in finished.out


@pytest.mark.parametrize("scheduler", ["orca", "faster_transformer", "vidur_orca"])
def test_explain_counts_what_a_memory_policy_reserves(scheduler):
    complete = config.load(EXAMPLES / "chat-70b.toml").model_copy(update={"variants": []})
    sent = complete.model_copy(update={"scheduler": complete.scheduler.model_copy(update={"policy": scheduler})})
    (variant,) = variants.build(sent)
    found = explain.explain(variant)
    kv, longest = variant.deployment.kv, variant.deployment.max_model_len
    assert {fit.seqs for fit in found.fits} == {kv.num_blocks * kv.block_size // longest}
    assert {fit.reserved_tokens for fit in found.fits[:-1]} == {longest}
    assert found.steps[1].name == f"decode {found.fits[0].seqs}"
    assert found.steps[1].tokens == found.fits[0].seqs


def test_explain_agrees_with_what_the_engine_lets_in():
    few = ["deployment.num_blocks=1000", "workload.request_rate=inf", "workload.num_requests=50"]
    orca = variants.build(config.load(EXAMPLES / "chat-70b.toml", few))[-1]
    steps = engine.simulate(orca.workload(0), orca.deployment, seed=0).steps
    most = explain.explain(orca).fits[0].seqs
    assert (steps.decode_seqs + steps.prefill_seqs).max() == most == 1000 // (4096 // 16)


def test_explain_shows_where_predictions_matter(cli, scenario_file):
    plain = cli("explain", scenario_file)
    predicted = cli("explain", scenario_file, "--set", "scheduler.memory=predicted_peak")
    assert "uses predictions" not in plain.out
    assert "uses predictions" in predicted.out


def test_explain_refuses_what_the_rules_of_an_engine_do_not_cover(cli, scenario_file):
    more = ("--set", "engine=sglang", "--set", "engine.prefix_cache=vllm")
    finished = cli("explain", scenario_file, *more)
    assert finished.code == 2
    assert "has SGLang's own prefix cache" in finished.err


@pytest.mark.parametrize(
    ("scheduler", "mixes"),
    [
        ("vllm_v1", True), ("sarathi", True), ("orca", True), ("trtllm", True), ("vllm_v0", False), ("static", False),
        ("sglang", False), ("sglang, mixed", True),
    ],
)  # fmt: skip
def test_explain_mixes_decodes_and_prompts_where_the_scheduler_does(scenario_file, scheduler, mixes):
    """As the steps of a simulation do."""
    rules = [f"scheduler.policy={scheduler.removesuffix(', mixed')}"]
    rules = ["scheduler.batching=static"] if scheduler == "static" else rules
    rules += ["scheduler.sglang.enable_mixed_chunk=true"] if scheduler.endswith("mixed") else []
    more = ["workload.max_tokens=2000", "workload.num_requests=40", "workload.request_rate=50"]
    variant = variants.build(config.load(scenario_file, [*rules, *more]).only("one"))[0]
    names = [step.name for step in explain.explain(variant).steps]
    assert any("+" in name for name in names) == mixes
    steps = engine.simulate(variant.workload(0), variant.deployment, seed=0).steps
    assert bool(((steps.decode_seqs > 0) & (steps.prefill_seqs > 0)).any()) == mixes


def test_explain_names_prefix_caches_that_are_not_modelled(cli, scenario_file):
    limited = ("--variant", "one", "--set", "workload.max_tokens=2000")
    shared = ("--set", "workload.groups={ count = 2, system_prompt = 100 }")
    for engine_name, shown in (("vllm", "vllm"), ("sglang", "sglang"), ("trtllm", "not modelled")):
        out = cli("explain", scenario_file, *limited, *shared, "--set", f"engine={engine_name}").out
        (row,) = [line.split("  ") for line in out.splitlines() if line.startswith("engine.prefix_cache")]
        cells = [cell.strip() for cell in row if cell.strip()]
        assert sorted(cells[1:4]) == ["not modelled", "sglang", "vllm"]
        assert cells[4] == shown
        (row,) = [line.split("  ") for line in out.splitlines() if line.startswith("engine.enable_prefix_caching")]
        cells = [cell.strip() for cell in row if cell.strip()]
        assert sorted(cells[1:4]) == ["false*", "true", "true"]
        assert cells[4] == str(engine_name != "trtllm").lower()
        (row,) = [line.split() for line in out.splitlines() if line.startswith("scheduler.async_scheduling")]
        assert sorted(row[1:4]) == ["false*", "true", "true"]
        assert row[4:] == [str(engine_name != "trtllm").lower()]
        assert "the simulator does not model it for TensorRT-LLM" in out
        found = {
            "vllm": "vLLM's, full blocks of 16", "sglang": "SGLang's radix tree, pages of 1",
            "not modelled": "which no cache finds yet",
        }  # fmt: skip
        assert found[shown] in " ".join(out.split())
    out = cli("explain", scenario_file, *limited, "--set", "engine=vllm", "--set", "scheduler.reserve=true").out
    assert "Steps do not overlap here: reserve = true is not modelled with async_scheduling yet" in " ".join(
        out.split()
    )
    (row,) = [line for line in out.splitlines() if line.startswith("engine.block_size")]
    assert "(set)" not in row
    out = cli("explain", scenario_file, *limited, "--set", "engine={name='vllm',block_size=32}").out
    assert [line.split()[-2:] for line in out.splitlines() if line.startswith("engine.block_size")] == [["32", "(set)"]]


@pytest.mark.parametrize(
    ("settings", "row"),
    [
        (("scheduler.reserve=false",), "vllm_v1"),
        (
            (
                "scheduler.policy=trtllm", "scheduler.trtllm.capacity_scheduler_policy=MAX_UTILIZATION",
                "scheduler.trtllm.enable_chunked_prefill=true", "workload.max_tokens=2000",
            ),
            "trtllm, capacity_scheduler_policy MAX_UTILIZATION, enable_chunked_prefill true",
        ),
    ],
)  # fmt: skip
def test_explain_shows_the_settings_of_a_scheduler_as_a_scenario_has_them(cli, scenario_file, settings, row):
    out = cli("explain", scenario_file, "--variant", "one", *(word for one in settings for word in ("--set", one))).out
    (line,) = [line for line in out.splitlines() if line.startswith("scheduler ")]
    assert line.removeprefix("scheduler").strip() == row


def test_explain_agrees_with_the_deployment(scenario_file):
    variant = variants.build(config.load(scenario_file))[0]
    found = explain.explain(variant)
    kv = variant.deployment.kv
    longest = found.fits[-1]
    assert longest.context_tokens == variant.deployment.max_model_len
    assert longest.by_memory * longest.context_tokens <= kv.num_blocks * kv.block_size
    assert (longest.by_memory + 1) * longest.context_tokens > (kv.num_blocks - longest.by_memory - 1) * kv.block_size
    for step in found.steps:
        assert 0 < step.floor_s < step.seconds
        assert sum(step.bound_shares.values()) == pytest.approx(1)


def test_one_page_for_variants_that_differ_in_more_than_the_scheduler(cli, scenario_file):
    text = scenario_file.read_text() + '[[variants]]\nname = "wide"\ndeployment.tp = 2\n'
    text += '[[variants]]\nname = "older"\nscheduler.policy = "vllm_v0"\n'  # its steps mix no decodes and prompts
    text += '[[variants]]\nname = "ratios"\nscheduler.policy = "hrrn"\n'
    scenario_file.write_text(text)
    out = cli("explain", scenario_file).out
    assert out.count("fit at once") == 4  # "Two, too" reserves memory, and so is no "as one"
    assert out.count("as one") == 1


def test_names_of_timelines_do_not_meet(tmp_path):
    found = variant_files(tmp_path / "t.json", ["a b", "C/D", "e"])
    assert [path.name for path in found.values()] == ["t.json", "t-c-d.json", "t-e.json"]
    assert variant_files(None, ["a"]) == {}
    twice = variant_files(tmp_path / "t.json", ["a", "b!", "b?"])
    with pytest.raises(OutputError, match="its own file"):
        outputs.require_writable(twice.values())


@pytest.mark.slow
def test_the_program_as_installed(scenario_file):
    program = Path(sys.executable).with_name("lengthwise")
    if not program.exists():
        pytest.skip("the package is not installed with its program")
    done = subprocess.run(
        [program, "simulate", scenario_file], capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.returncode == 0
    assert "TTFT" in done.stdout


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["scheduler.policy=multi_bin"], 'multi_bin has one bin; set scheduler.binning = "learned(k=8)"'),
        (["scheduler.policy=multi_bin", "scheduler.binning=bins(boundaries=[100])"], ""),
        (["scheduler.policy=vtc"], "vtc without tenants is first come, first served"),
        (["scheduler.policy=vtc", "workload.tenants=2"], ""),
        (["scheduler.policy=sjf"], ""),
    ],
)
def test_schedulers_without_their_input_are_noted(settings, expected):
    base = ["variants=[]", "predictor.kind=oracle", "workload.num_requests=20"]
    scenario = config.load("examples/lab-chat.toml", [*base, *settings])
    found = ineffective_options(variants.build(scenario), seeds=1)
    assert [note[: len(expected)] for note in found] == [expected] * bool(expected)
