"""Commands without a scenario file: short options name the model, the GPU, the load and the workload."""

from __future__ import annotations

import json

import pytest

MODEL = ("simulate", "--model", "llama-3.1-8b")
SMALL = ("--set", "workload.num_requests=50", "--set", "run.model_draws=0")


@pytest.fixture
def simulated(cli, tmp_path):
    """Return the numbers of a simulation, and what it printed."""

    def run(*arguments):
        path = tmp_path / "numbers.json"
        finished = cli("simulate", *arguments, *SMALL, "--json", path)
        assert finished.code == 0, finished.err
        return json.loads(path.read_text()), finished

    return run


def test_the_options_are_the_same_scenario_as_a_file(simulated, tmp_path):
    file = tmp_path / "same.toml"
    file.write_text(
        'name = "llama-3.1-8b on L40S"\n[workload]\nprompt = 300\noutput = 40\nrequest_rate = 3\n'
        '[deployment]\nmodel = "llama-3.1-8b"\ngpu = "L40S"\n[run]\nseeds = 5\n'
    )
    by_file, _ = simulated(file)
    by_options, finished = simulated("--model", "llama-3.1-8b", "--gpu", "L40S", "--rate", 3, "--workload", "300/40")
    assert "300/40 at 3 requests/s" in finished.out
    for one in (by_file, by_options):
        for variant in one["results"]:
            variant.pop("scenario")
    assert by_options["results"] == by_file["results"]


def test_tp_is_the_smallest_that_fits(simulated):
    found, finished = simulated("--model", "llama-3.1-70b", "--gpu", "H100", "--rate", 1)
    assert "tp 2 is the smallest that fits" in finished.out
    assert "tp = 2" in found["results"][0]["scenario"]
    found, finished = simulated("--model", "llama-3.1-70b", "--gpu", "H100", "--rate", 1, "--tp", 4)
    assert "smallest" not in finished.out
    assert "tp = 4" in found["results"][0]["scenario"]


def test_a_trace_keeps_its_times_unless_a_rate_is_given(simulated, tmp_path, monkeypatch):
    (tmp_path / "trace.csv").write_text(
        "arrived_at,num_prefill_tokens,num_decode_tokens\n" + "".join(f"{i * 0.5},100,20\n" for i in range(50))
    )
    monkeypatch.chdir(tmp_path)
    options = ("--model", "llama-3.1-8b", "--gpu", "L40S", "--workload", "trace.csv")
    replayed, _ = simulated(*options)
    assert "request_rate" not in replayed["results"][0]["scenario"]
    faster, _ = simulated(*options, "--rate", 40)
    assert "request_rate = 40" in faster["results"][0]["scenario"]


def test_options_replace_the_settings_of_a_file(cli, scenario_file):
    finished = cli("explain", scenario_file, "--gpu", "H200", "--tp", "2")
    assert finished.code == 0, finished.err
    assert "2 x H200" in finished.out


@pytest.mark.slow
def test_a_search_compares_the_given_gpus(cli, tmp_path):
    path = tmp_path / "found.json"
    options = ("--model", "llama-3.1-8b", "--gpu", "L40S,H100", "--rate", "4", "--limit", "ttft.p90=2s")
    finished = cli(
        "search", *options, "--set", "search.space.tp=[1]", "--set", "workload.num_requests=200", "--json", path
    )
    assert finished.code == 0, finished.err
    text = path.read_text()
    assert "L40S" in text
    assert "H100" in text
    assert "ttft.p90" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("simulate",), "give a scenario file, or --model and --gpu and --rate"),
        (("simulate", "--model", "llama-3.1-8b", "--gpu", "H100"), "give a scenario file, or --rate"),
        (("capacity", "--gpu", "H100"), "give a scenario file, or --model"),
        (("search", "--model", "llama-3.1-8b", "--rate", "1"), "give a scenario file, or --gpu"),
        (("simulate", "--model", "lama-3.1-8b", "--gpu", "H100", "--rate", "1"), "Did you mean: llama-3.1-8b"),
        (("simulate", "--model", "llama-3.1-8b", "--gpu", "H100", "--rate", "0"), "--rate"),
        (("simulate", "--model", "llama-3.1-8b", "--gpu", "H100", "--rate", "1", "--workload", "chatt"), "chat-1m"),
        ((*MODEL, "--gpu", "H100", "--workload", "nofile.csv"), "there is no file nofile.csv"),
        ((*MODEL, "--gpu", "A100", "--rate", "1"), "A100-40GB, A100-80GB, A100-80GB-PCIe"),
        ((*MODEL, "--gpu", "H100", "--rate", "-1"), "above 0, at least 0.000001; it is -1"),
        (("explain", "--model", "llama-3.1-405b", "--gpu", "L4"), "No tp up to 16 fits"),
        (("search", "--model", "llama-3.1-8b", "--gpu", "H10,L40S", "--rate", "1"), "H100"),
    ],
)
def test_wrong_options_get_one_message_that_names_them(cli, arguments, message):
    finished = cli(*arguments)
    assert (finished.code, finished.out) == (2, "")
    assert message in finished.err
    assert "in the options" not in finished.err


def test_columns_of_a_trace_are_named_by_options(cli, tmp_path):
    (tmp_path / "calls.csv").write_text("ts,len in,len out\n0,100,5\n1,200,6\n")
    command = ("simulate", "--model", "llama-3.1-8b", "--gpu", "H100", "--workload", tmp_path / "calls.csv", *SMALL[2:])
    unknown = cli(*command)
    assert unknown.code == 2
    assert "or give --column prompt_tokens=" in unknown.err
    names = [
        word
        for pair in ("prompt_tokens=len in", "output_tokens=len out", "arrival_s=ts")
        for word in ("--column", pair)
    ]
    finished = cli(*command, *names, "--json", tmp_path / "out.json")
    assert (finished.code, "is ignored" in finished.err) == (0, False)
    counts = json.loads((tmp_path / "out.json").read_text("utf-8"))["results"][0]["summary"]["counts"]
    assert counts["finished"] == 2
    wrong = cli(*command, "--column", "prompt_tokens")
    assert (wrong.code, "--column takes NAME=COLUMN" in wrong.err) == (2, True)
