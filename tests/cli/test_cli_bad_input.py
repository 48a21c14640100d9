"""Bad input: one clear message, exit 2, nothing half-written."""

from __future__ import annotations

from pathlib import Path

import pytest

HEADER = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
POLICIES = """
from lengthwise import policy

@policy.rank
def raises(arrival_s):
    return 1 / (arrival_s - arrival_s)

@policy.rank
def not_a_number(arrival_s):
    return arrival_s * float("nan")

def undecorated(arrival_s):
    return arrival_s

@policy.batching
def wrong_axis(decodes):
    return 1, 1, 0
"""
SIGNATURE = """
from lengthwise import policy

@policy.rank
def peeks(output_tokens):
    return output_tokens
"""

BAD = {
    "a typo in a key": (["engine.max_num_seq=4"], "did you mean engine.max_num_seqs?"),
    "a key in the wrong section": (["deployment.block_size=4"], "did you mean engine.block_size?"),
    "a wrong type": (["deployment.tp=four"], "deployment.tp: must be a whole number; it is 'four'"),
    "a wrong range": (["engine.gpu_memory_utilization=1.5"], "must be at most 1; it is 1.5"),
    "an unknown model": (["deployment.model=llama-3-9b"], "llama-3-8b"),
    "an unknown gpu": (["deployment.gpu=H1000"], "H100"),
    "an unknown node": (["deployment.node=dgx-h10"], "dgx-h100"),
    "an unknown scheduler": (["scheduler=vllm"], "vllm_v1"),
    "an unknown policy": (["scheduler.rank=sjff"], "sjf"),
    "an unknown preset": (["workload.preset=chat-2m"], "chat-1m"),
    "an unknown planner": (["deployment.memory_planner=vidr"], "vidur"),
    "an unknown dtype": (["deployment.weight_dtype=fp7"], "fp8"),
    "a model that does not fit": (["deployment.model=llama-2-70b"], "tp"),
    "a tp that does not divide": (["deployment.tp=7"], "tp"),
    "too many stages": (["deployment.pp=33"], "pp"),
    "a context beyond the model": (["engine.max_model_len=1000000"], "max_model_len must be at most"),
    "a prompt too long, strictly": (["engine.max_model_len=100", "run.strict=true"], "can never fit"),
    "a warm-up that leaves nothing": (["run.warmup_s=1h"], "warm"),
    "no trace": (["workload.trace=none.csv"], "none.csv"),
    "an empty trace": (["workload.trace=empty.csv"], "empty.csv"),
    "a negative time": (["workload.trace=negative.csv"], "negative.csv"),
    "a NaN": (["workload.trace=nan.csv"], "nan.csv, line 3"),
    "a negative length": (["workload.trace=length.csv"], "length.csv, line 3"),
    "a truncated trace": (["workload.trace=truncated.csv"], "truncated.csv, line 3"),
    "an unknown trace format": (["workload.trace=good.csv", "workload.format=azur"], "azure"),
    "a config.json without keys": (["deployment.model=config.json"], "hidden_size"),
    "a config.json that is none": (["deployment.model=broken.json"], "broken.json"),
    "no config.json": (["deployment.model=none/config.json"], "none/config.json"),
    "no profile": (["deployment.cost=vidur:nowhere"], "nowhere"),
    "no tables": (["deployment.cost=tables:nowhere.npz"], "nowhere.npz"),
    "a policy that raises": (["scheduler.rank=mine.py:raises"], "ZeroDivisionError"),
    "a policy that returns NaN": (["scheduler.rank=mine.py:not_a_number"], "not_a_number"),
    "a policy without a decorator": (["scheduler.rank=mine.py:undecorated"], "lengthwise.policy.rank"),
    "a policy of another axis": (["scheduler.rank=mine.py:wrong_axis"], "lengthwise.policy.rank"),
    "a policy that peeks": (["scheduler.rank=peeks.py:peeks"], "it may take, by name"),
    "no policy file": (["scheduler.rank=none.py:x"], "none.py"),
    "no such policy in the file": (["scheduler.rank=mine.py:x"], "not_a_number"),
}


@pytest.fixture
def folder(tmp_path, scenario_file):
    files = {
        "empty.csv": "",
        "unsorted.csv": f"{HEADER}0,5,5\n9,5,5\n3,5,5\n",
        "negative.csv": f"{HEADER}-1,5,5\n",
        "nan.csv": f"{HEADER}0,5,5\nnan,5,5\n",
        "length.csv": f"{HEADER}0,5,5\n1,-5,5\n",
        "truncated.csv": f"{HEADER}0,5,5\n1,5",
        "good.csv": f"{HEADER}0,5,5\n",
        "config.json": '{"model_type": "llama"}',
        "broken.json": "{",
        "mine.py": POLICIES,
        "peeks.py": SIGNATURE,
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("words", ["unsorted.csv, line 4", "set workload.sort = true"])
def test_a_replayed_trace_out_of_order_is_an_error(cli, folder, words):
    replay = folder / "replay.toml"
    replay.write_text((folder / "small.toml").read_text().replace("request_rate = 20\n", ""))
    finished = cli("simulate", replay, "--set", "workload.trace=unsorted.csv")
    assert (finished.code, finished.out) == (2, "")
    assert words in finished.err


@pytest.mark.parametrize(("overrides", "words"), BAD.values(), ids=BAD)
def test_simulate_ends_with_one_message_and_no_file(cli, folder, overrides, words):
    out, html = folder / "out.json", folder / "out.html"
    sets = [part for override in overrides for part in ("--set", override)]
    finished = cli("simulate", folder / "small.toml", *sets, "--json", out, "--report", html)
    assert (finished.code, finished.out) == (2, "")
    assert words in finished.err
    errors = [line for line in finished.err.splitlines() if not line.startswith("compiling the simulator")]
    assert errors[0].startswith("error: ")
    assert sum(line.startswith("error") for line in errors) == 1
    assert "Traceback" not in finished.err
    assert not out.exists()
    assert not html.exists()


@pytest.mark.parametrize("overrides", [BAD["an unknown model"][0], BAD["a model that does not fit"][0]])
def test_explain_ends_the_same_way(cli, folder, overrides):
    finished = cli("explain", folder / "small.toml", "--set", *overrides)
    assert (finished.code, finished.out) == (2, "")
    assert finished.err.startswith("error: ")


def test_the_note_gives_the_location_in_the_file(cli, folder):
    finished = cli("simulate", folder / "small.toml", "--set", "deployment.model=llama-3-9b")
    assert f"(in variant 'one' of {folder / 'small.toml'}, deployment.model)" in finished.err


@pytest.fixture
def not_simulated(monkeypatch):
    def simulated(*_, **__):
        raise AssertionError("it was simulated first")

    monkeypatch.setattr("lengthwise.engine.simulation", simulated)


@pytest.mark.usefixtures("not_simulated")
@pytest.mark.parametrize("option", ["--json", "--report", "--timeline"])
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere/out.x", "does not exist; create it first"),
        (".", "it is a folder"),
        ("small.toml/out.x", "is a file, not a folder"),
    ],
)
def test_a_path_that_cannot_be_written_is_known_before_the_simulation(cli, folder, option, path, words):
    finished = cli("simulate", folder / "small.toml", option, folder / path)
    assert (finished.code, finished.out) == (2, "")
    assert finished.err.startswith("error: cannot write")
    assert words in finished.err


@pytest.mark.usefixtures("not_simulated")
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="this system has no /proc")
def test_a_folder_that_takes_no_files_is_known_before_the_simulation(cli, folder):
    finished = cli("simulate", folder / "small.toml", "--report", "/proc/r.html")
    assert (finished.code, finished.out) == (2, "")
    assert finished.err.startswith("error: cannot write /proc/r.html: ")


@pytest.mark.usefixtures("not_simulated")
@pytest.mark.parametrize(("option", "name"), [("--json", "small.toml"), ("--report", "good.csv")])
def test_no_output_over_what_the_scenario_is_read_from(cli, folder, option, name):
    before = (folder / name).read_bytes()
    replayed = ["--set", "workload={trace='good.csv',num_requests=1}"]
    finished = cli("simulate", folder / "small.toml", *replayed, option, folder / "." / name)
    assert (finished.code, finished.out) == (2, "")
    assert "it is also an input" in finished.err
    assert (folder / name).read_bytes() == before


@pytest.mark.usefixtures("not_simulated")
def test_only_json_goes_to_standard_output(cli, folder):
    finished = cli("simulate", folder / "small.toml", "--report", "-")
    assert (finished.code, finished.out) == (2, "")
    assert "only --json goes to standard output" in finished.err


@pytest.mark.parametrize(
    "line",
    [
        ("compare", "a.parquet", "b.parquet", "--report", "-"),
        ("lab", "small.toml", "--report", "-"),
        ("search", "small.toml", "--report", "-"),
        ("simulate", "small.toml", "--records", "-"),
        ("bench", "http://127.0.0.1:9", "small.toml", "--records", "-"),
        ("theory", "queue", "--exponential", "1", "--load", "0.5", "--report", "-"),
        ("calibrate", "small.toml", "a.parquet", "--out", "cost.npz", "--report", "-"),
    ],
)
def test_no_page_and_no_records_go_to_standard_output(cli, folder, monkeypatch, line):
    monkeypatch.chdir(folder)
    finished = cli(*line)
    assert (finished.code, finished.out) == (2, "")
    assert "only --json goes to standard output" in finished.err
    assert not (folder / "-").exists()


@pytest.mark.parametrize("command", ["explain", "capacity", "lab", "search", "simulate", "bench", "calibrate"])
def test_every_command_reports_what_an_override_replaced(cli, folder, command):
    """And then ends (but for simulate, which first looks whether it can work), as there is no such trace."""
    line = {
        "bench": ["http://127.0.0.1:9", folder / "small.toml"],
        "calibrate": [folder / "small.toml", folder / "none.parquet", "--out", folder / "cost.npz"],
    }.get(command, [folder / "small.toml"])
    trace = "good.csv" if command == "simulate" else "none.csv"
    finished = cli(command, *line, "--set", f"workload.trace={trace}")
    assert finished.code == (0 if command == "simulate" else 2)
    assert finished.err.count("--set workload.trace takes the place of workload.prompt and workload.output") == 1


@pytest.mark.usefixtures("not_simulated")
def test_a_report_without_its_extra_is_known_before_the_simulation(cli, folder, monkeypatch):
    monkeypatch.setattr("lengthwise.cli.outputs.find_spec", lambda _: None)
    finished = cli("simulate", folder / "small.toml", "--report", folder / "out.html")
    assert (finished.code, finished.out) == (2, "")
    assert "pip install 'lengthwise[report]'" in finished.err


def test_two_outputs_in_one_file(cli, folder):
    same = folder / "out"
    finished = cli("simulate", folder / "small.toml", "--json", same, "--report", folder / "." / "out")
    assert finished.code == 2
    assert "its own file" in finished.err
    assert not same.exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[workload", "not valid TOML"),
        ("", "workload: is missing"),
        ("[workload]\nisl = 5\n", "deployment: is missing"),
    ],
)
def test_files_that_are_no_scenarios(cli, tmp_path, text, words):
    (tmp_path / "s.toml").write_text(text)
    for command in ("simulate", "explain"):
        finished = cli(command, tmp_path / "s.toml")
        assert (finished.code, finished.out) == (2, "")
        assert words in finished.err


def test_no_scenario_file(cli, tmp_path):
    finished = cli("simulate", tmp_path / "none.toml")
    assert finished.code == 2
    assert "there is no scenario file" in finished.err


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("search", "examples/buy-70b.toml", "--top", "0"), ("'--top'", "0")),
        (("theory", "queue", "--load", "0.5", "--slots", "four"), ("'--slots'", "four")),
        (("capacity", "examples/chat-70b.toml", "--limit", "ttft"), ("--limit takes METRIC=BOUND", "it is 'ttft'")),
        (("capacity", "examples/chat-70b.toml", "--limit", "ttft.p9=-1s"), ("--limit ttft.p9", "it is '-1s'")),
        (("capacity", "examples/chat-70b.toml", "--precision", "0"), ("--precision: must be above 0", "it is 0")),
        (("explain", "examples/chat-70b.toml", "--cost", "guess"), ("--cost: must be one of", "it is 'guess'")),
    ],
)
def test_errors_name_the_option_and_the_value(cli, monkeypatch, words, shown):
    monkeypatch.chdir(Path(__file__).parents[2])
    finished = cli(*words)
    assert finished.code == 2
    for text in shown:
        assert text in finished.err
