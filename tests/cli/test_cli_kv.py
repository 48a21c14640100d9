"""lengthwise kv as a user sees it."""

from __future__ import annotations

import json

import pytest

SCENARIO = """
[workload]
prompt = 100
output = 50
num_requests = 60
session_rate = 2
[workload.sessions]
turns = 3
[deployment]
model = "llama-3.1-8b"
gpu = "A100-80GB"
[[variants]]
name = "one"
engine.enable_prefix_caching = true
[[variants]]
name = "two"
"""


@pytest.fixture
def scenario(tmp_path):
    path = tmp_path / "chat.toml"
    path.write_text(SCENARIO)
    return path


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    same = {"input_length": 1200, "output_length": 5}
    rows = [{"timestamp": 1000 * i, **same, "hash_ids": [7, 8, 9 + i]} for i in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_scenario_has_table_report_and_json(cli, scenario, tmp_path):
    out, page = tmp_path / "kv.json", tmp_path / "kv.html"
    done = cli("kv", scenario, "--seeds", 2, "--memory", 1, "--load", "local SSD=3", "--json", out, "--report", page)
    assert done.code == 0, done.err
    assert "one is the first of 2 variants" in done.err
    assert "GPU pool" in done.out
    assert "Loading from local SSD at 3 GB/s" in done.out
    written = json.loads(out.read_text())
    assert written["format"] == "lengthwise.kv"
    assert {size["name"] for size in written["sizes"]} >= {"1 GB", "GPU pool", "all blocks"}
    assert "What a prefix cache finds" in page.read_text()
    other = cli("kv", scenario, "--variant", "two", "--json", "-")
    assert json.loads(other.out)["found"]["simulated"]["value"] is None


def test_a_narrow_table_has_what_decides(cli, scenario, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    words = ("--memory", 1, "--memory-price", 0.01, "--set", "deployment.num_blocks=40")
    table = cli("kv", scenario, *words).out.partition("An unlimited cache")[0]
    head = table.splitlines()[1]
    assert all(name in head for name in ("cache", "tokens", "tokens found, %", "net, $/h")), table
    assert max(map(len, table.splitlines()[1:-1])) <= 80


def test_a_trace_needs_no_deployment(cli, trace):
    done = cli("kv", trace, "--prompts-only", "--json", "-")
    assert done.code == 0, done.err
    last = json.loads(done.out)["sizes"][-1]
    # Of the four prompts the last three find two blocks of 512 tokens; of 12 references 6.
    assert (last["blocks"], last["gb"], last["block_share"]["value"]) == (2, None, 0.5)
    with_model = json.loads(cli("kv", trace, "--model", "llama-3.1-8b", "--block-size", 16, "--json", "-").out)
    assert with_model["sizes"][-1]["gb"] > 0


def test_sizes_have_units(cli, trace):
    sizes = ("2", "3GB", "4 GiB", "0.005 TB")
    words = [word for size in sizes for word in ("--memory", size)]
    made = json.loads(cli("kv", trace, "--model", "llama-3.1-8b", *words, "--json", "-").out)
    given = sorted(size["gb"] for size in made["sizes"] if size["is_given"])
    assert given == pytest.approx([2, 3, 4 * 1.073741824, 5], rel=0.02)


def test_the_file_that_the_message_names_replays_the_trace(cli, trace, tmp_path):
    refused = cli("kv", trace, "--memory-price", "0.01", "--model", "llama-3.1-8b").err.replace("\n", " ")
    trace_key, _, rest = refused.partition("replays it: ")[2].partition(" and ")
    (tmp_path / "replay.toml").write_text(f"{trace_key}\n{rest.strip().replace('...', 'A100-80GB')}\n")
    done = cli("kv", tmp_path / "replay.toml", "--memory-price", "0.01", "--json", "-")
    assert done.code == 0, done.err
    assert json.loads(done.out)["usd_per_gb_hour"] == 0.01


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--memory", "0"], "finite number of GB above 0; it is 0"),
        (["--memory", "64 pages"], "--memory takes a number of GB, such as 64, 64GB, 64GiB or 1TB; it is '64 pages'"),
        (["--memory", "GB"], "--memory takes a number of GB"),
        (["--load", "disk=0"], "--load disk must be a finite number of GB/s above 0; it is 0"),
        (["--memory", "-4"], "--memory must be a finite number of GB above 0; it is -4"),
        (["--load", "disk"], "--load takes NAME=GB/S"),
        (["--load", "=3"], "--load takes NAME=GB/S, such as \"local SSD=6\"; it is '=3'"),
        (["--load", "3"], "--load takes NAME=GB/S"),
        (["--load", "disk=1", "--load", "disk =2"], "--load must give each source once; 'disk' occurs 2 times"),
        (["--memory-price", "0"], "--memory-price must be above 0"),
        (["--memory-price", "nan"], "--memory-price must be above 0 and finite; it is nan"),
        (["--model", "llama-3.1-8b"], "--model needs a trace"),
        (["--variant", "three"], "has no variant 'three'"),
    ],
)
def test_bad_options_of_a_scenario_are_one_error(cli, scenario, words, message):
    done = cli("kv", scenario, *words)
    assert done.code == 2
    assert message in done.err
    assert done.err.count("error:") == 1


def test_bad_input_is_one_error(cli, trace, tmp_path, scenario_file):
    assert "prompts share prefixes" in cli("kv", scenario_file).err
    for words, message in (
        ([trace, "--variant", "one"], "--variant needs a scenario"),
        ([trace, "--memory", "5"], "give --model"),
        ([trace, "--memory-price", "1", "--model", "opt-13b"], 'deployment = { model = "opt-13b", gpu = "..." }'),
        ([trace, "--load", "SSD=3"], f'A .toml file replays it: workload.trace = "{trace}"'),
        ([trace, "--block-size", "100"], "block_size must divide the 512 tokens"),
        (["chat-1m"], "prompts share prefixes"),
        ([tmp_path / "absent.jsonl"], "absent.jsonl"),
    ):
        done = cli("kv", *words)
        assert done.code == 2, (words, done.err)
        assert message in done.err, (words, done.err)


def spans(*lengths: tuple[int, int]) -> str:
    def span(second: int, prompt: int, output: int) -> dict:
        counts = {"gen_ai.usage.input_tokens": prompt, "gen_ai.usage.output_tokens": output}
        attributes = [{"key": key, "value": {"intValue": str(value)}} for key, value in counts.items()]
        times = {"startTimeUnixNano": f"{second}000000000", "endTimeUnixNano": f"{second + 1}000000000"}
        return {"traceId": "t", "spanId": "s", "name": "chat", "attributes": attributes} | times

    calls = [span(2 * number + 1, *one) for number, one in enumerate(lengths)]
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": calls}]}]})


def turns(*lengths: tuple[int, int]) -> str:
    rows = [{"input_length": prompt, "output_length": output, "session_id": "s"} for prompt, output in lengths]
    return "".join(json.dumps(row | ({"delay": 5} if i else {"timestamp": 0})) + "\n" for i, row in enumerate(rows))


@pytest.mark.parametrize("text", [spans, turns])
def test_a_trace_without_block_ids_is_measured_in_small_blocks(cli, tmp_path, text):
    path = tmp_path / "trace.jsonl"
    path.write_text(text((300, 50), (400, 20)))
    found = 21 * 16 / 700  # the full blocks of the first call's 349 computed tokens
    measured = [
        json.loads(cli("kv", path, "--json", "-", *given).out)["sizes"][-1]["token_share"]["value"]
        for given in ((), ("--block-size", 16))
    ]
    assert measured == pytest.approx([found, found])
    shown = cli("workload", "show", path).out
    assert (
        f"{found:.1%} of the prompt tokens: a prefix cache without limit finds them (in blocks of 16 tokens)" in shown
    )


def test_hash_ids_are_of_blocks_of_512_tokens(cli, trace):
    assert "(in blocks of 512 tokens)" in cli("workload", "show", trace).out


def test_show_reads_named_columns_and_says_where_milliseconds_may_be_seconds(cli, tmp_path):
    rows = "".join(f"{at * 500},100,5\n" for at in range(200))
    (tmp_path / "calls.csv").write_text(f"ts_ms,len in,len out\n{rows}")
    show = ("workload", "show", tmp_path / "calls.csv")
    assert "arrival_ms=ts_ms" in cli(*show).err
    names = ("--column", "prompt_tokens=len in", "--column", "output_tokens=len out", "--column")
    wrong, right = cli(*show, *names, "arrival_s=ts_ms"), cli(*show, *names, "arrival_ms=ts_ms")
    assert ("--column arrival_ms=NAME" in wrong.err, right.err) == (True, "")
    assert "  2 requests a second" in right.out
    assert "not both" in cli(*show, *names, "arrival_ms=ts_ms", "--format", "vidur").err


VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens,{}\n0,20,5,1\n1,20,5,0\n"


@pytest.mark.parametrize("command", [("workload", "show"), ("simulate",), ("kv",)])
def test_a_column_with_a_misspelt_name_is_noted(cli, tmp_path, command):
    (tmp_path / "t.csv").write_text(VIDUR.format("prioritty"))
    replay = tmp_path / "replay.toml"
    replay.write_text('workload.trace = "t.csv"\ndeployment = { model = "llama-3-8b", gpu = "L40S" }\n')
    done = cli(*command, replay if command == ("simulate",) else tmp_path / "t.csv")
    assert f"{tmp_path / 't.csv'}: column prioritty is ignored; did you mean priority?" in done.err
