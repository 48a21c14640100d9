"""Shared prefixes and sessions on the command line: what the reports show, and one message for each mistake."""

from __future__ import annotations

import json
import math
import re

import pytest

from lengthwise import config
from lengthwise.usecases.kv import study_trace
from lengthwise.usecases.requests import workload_by_seed
from lengthwise.workload import write

CHAT = """
[workload]
prompt = 60
output = 8
num_requests = 120
session_rate = 4

[workload.groups]
count = 3
system_prompt = 320

[workload.sessions]
turns = 3
max_turns = 6
think_time = { median = "0.5s" }

[deployment]
model = "llama-3.2-1b"
gpu = "A100-80GB"

[engine]
max_model_len = 4096

[[variants]]
name = "cached"
engine.enable_prefix_caching = true

[[variants]]
name = "computed"
"""

PLAIN = CHAT[: CHAT.index("[workload.groups]")].replace("session_rate", "request_rate") + CHAT[CHAT.index("[deploy") :]


@pytest.fixture
def chat(tmp_path):
    path = tmp_path / "chat.toml"
    path.write_text(CHAT)
    return path


def summaries(path):
    return {result["name"]: result for result in json.loads(path.read_text())["results"]}


def test_simulate_reports_what_the_cache_saved(cli, chat, tmp_path):
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    finished = cli("simulate", chat, "--json", out, "--report", page)
    assert finished.code == 0, finished.err
    for words in ("Prompt tokens cached %", "Prefill saved s", "at turn: mean TTFT;", "prompt tokens cached, %"):
        assert words in finished.out
    found = summaries(out)
    cache, off = (found[name]["summary"]["prefix_cache"] for name in ("cached", "computed"))
    assert 0.5 < cache["hit_rate"]["value"] < 1
    assert 0 < cache["saved_share"]["value"] < 1
    assert off["hit_rate"]["value"] is None
    assert off["saved_prefill_s"]["value"] is None
    assert cache["turns"]["1"]["hit_rate"]["value"] < cache["turns"]["2"]["hit_rate"]["value"]
    shares = [turn["share"]["value"] for turn in cache["turns"].values()]
    assert math.isclose(sum(shares), 1)
    over_time = found["cached"]["prefix_cache_over_time"]
    assert len(over_time["time_s"]) == len(over_time["hit_rate"])
    assert "By turn of the session" in page.read_text()
    assert "share of prompt tokens cached" in page.read_text()


def test_turns_of_an_overloaded_run_are_in_seconds_and_others_in_milliseconds(cli, chat, tmp_path):
    page = tmp_path / "out.html"
    for rate, unit, other in (("4", "ms", " s"), ("2000", "s", " ms")):
        overload = ["--set", f"workload.session_rate={rate}", "--set", "engine.max_num_seqs=2"]
        overload += ["--set", "workload.output=400"] if unit == "s" else []
        finished = cli("simulate", chat, *overload, "--report", page)
        (row,) = [line for line in finished.out.splitlines() if line.startswith("\N{BOX DRAWINGS LIGHT VERTICAL} 3 ")]
        assert f" {unit}" in row
        assert f"{other};" not in row
        assert f" {unit}<" in page.read_text()[page.read_text().index("By turn of the session") :]


def test_workload_show_describes_the_sessions_of_a_scenario_and_of_its_trace(cli, chat, tmp_path):
    chat.write_text(chat.read_text().replace("output = 8\n", "output = 8\nmax_tokens = 8\n"))
    drawn = cli("workload", "show", chat)
    assert drawn.code == 0, drawn.err
    requests = workload_by_seed(config.load(chat))(0)
    write(requests, tmp_path / "chat.parquet")
    assert cli("workload", "show", tmp_path / "chat.parquet").out.splitlines()[1:] == drawn.out.splitlines()[1:]
    found = study_trace(requests, None, None).sizes[-1].token_share.value
    count = len(requests.session_starts_s)
    for words in (
        f"{count}, {len(requests) / count:.3g} requests each",
        "500 ms (median), 500 ms (p90) until the next request",
        f"{found:.1%} of the prompt tokens: a prefix cache without limit finds them",
        f"finds them (in blocks of {requests.prefixes.block_tokens} token",
        "of 100% of the requests; 100.0% of the outputs end there",
        "sessions a second",
        "requests a second while as many sessions end as start",
        "if requests took no time",
        "(cv of the times between starts of sessions; Poisson: 1)",
    ):
        assert words in drawn.out
    rows = "".join(f"{i * i},5,5,{i % 2}\n" for i in range(9))  # no row of a CSV file waits for another
    (tmp_path / "t.csv").write_text(f"arrived_at,num_prefill_tokens,num_decode_tokens,session\n{rows}")
    assert "(cv of the times between arrivals; Poisson: 1)" in cli("workload", "show", tmp_path / "t.csv").out
    plain = cli("workload", "show", "chat-1m", "--num-requests", "50").out
    assert not any(word in plain for word in ("sessions", "shared", "max_tokens", "think"))


@pytest.mark.parametrize("has_prefixes", [True, False], ids=["caching off", "no prefixes"])
def test_other_reports_have_no_word_of_it(cli, tmp_path, has_prefixes):
    text = (CHAT if has_prefixes else PLAIN).partition("[[variants]]")[0]
    text = text if has_prefixes else text.replace("[engine]", "[engine]\nenable_prefix_caching = true")
    (tmp_path / "plain.toml").write_text(text)
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    finished = cli("simulate", tmp_path / "plain.toml", "--json", out, "--report", page)
    assert finished.code == 0, finished.err
    assert "cached" not in finished.out
    assert '"prefix_cache' not in out.read_text()
    assert "By turn of the session" not in page.read_text()
    assert "share of prompt tokens cached" not in page.read_text()


def test_explain_shows_the_rules_and_sizes_of_the_cache_and_its_tiers(cli, chat):
    off = cli("explain", chat, "--variant", "computed").out
    assert "off; prompts share prefixes, which engine.enable_prefix_caching = true would find" in off
    assert "prefixes are cached in" not in off
    tiers = {"size_gb": "4", "latency": "50us", "load": "if_faster", "storage.size_gb": "30", "storage.shared": "true"}
    settings = [part for key, value in tiers.items() for part in ("--set", f"engine.kv_offloading.{key}={value}")]
    finished = cli("explain", chat, "--variant", "cached", *settings, "--set", "deployment.num_blocks=500")
    assert finished.code == 0, finished.err
    for words in (
        "vLLM's, full blocks of 16 tokens, least recently used evicted first",
        "blocks of prompts; 25 GB/s of each GPU in each direction, 50.0 us each; loads where faster than computing",
        "all blocks of the CPU memory, replicas find what others have written; reads 6 GB/s, writes 3 GB/s of each",
    ):
        assert words in finished.out
    context = int(re.search(r"contexts of ([\d,]+) tokens", finished.out)[1].replace(",", ""))
    block_gb = 2 * 16 * 8 * 64 * 2 * 16 / 1e9  # keys and values of 16 layers, 8 heads of 64, 2 bytes, 16 tokens
    for name, gb in (("KV cache of the GPUs", 500 * block_gb), ("CPU memory", 4), ("storage of all replicas", 30)):
        size, tokens, contexts = re.search(rf"{name} +([\d.]+) GB +([\d,]+) +([\d,]+)", finished.out).groups()
        count = int(tokens.replace(",", ""))
        assert float(size) == pytest.approx(gb, rel=1e-3)
        assert count == pytest.approx(gb / block_gb * 16, abs=16)
        assert int(contexts.replace(",", "")) == count // context
    unlimited = cli(
        "explain", chat, "--variant", "cached", *settings[:4], "--set", "engine.kv_offloading.storage={}"
    ).out
    assert re.search(r"storage +no limit", unlimited)
    tree = ("--set", "engine.prefix_cache=sglang", "--set", "engine.page_size=1")
    assert "SGLang's radix tree, pages of 1 token, eviction lru" in cli("explain", chat, *tree).out


def test_explain_tells_the_story_of_a_request(cli, chat):
    finished = cli("explain", chat, "--request", "2")
    assert finished.code == 0, finished.err
    cached, computed = finished.out.split("computed, request 2")
    assert "the prefix cache is off" in computed
    for words in ("cached, request 2", "of the prompt; they save", "replica", "TTFT"):
        assert words in cached
    assert cli("explain", chat, "--request", "120").err.startswith("error: a request must have a number from 0 to 119")


def test_cpu_memory_loads_what_a_short_pool_has_lost(cli, chat, tmp_path):
    out = tmp_path / "out.json"
    text = chat.read_text()
    for was, now in (('gpu = "A100-80GB"', 'gpu = "A100-80GB"\nnum_blocks = 64'), ("4096", "1024"), ('"0.5s"', '"5s"')):
        text = text.replace(was, now)
    chat.write_text(text[: text.index("[[variants]]")] + "enable_prefix_caching = true\nkv_offloading.size_gb = 4\n")
    finished = cli("simulate", chat, "--json", out)
    assert finished.code == 0, finished.err
    assert "Prompt tokens loaded %" in finished.out
    (result,) = summaries(out).values()
    cache = result["summary"]["prefix_cache"]
    assert cache["loaded_share"]["value"] > 0.05
    assert 0 < cache["load_s"]["value"] < 0.1
    stories = [cli("explain", chat, "--request", number).out for number in range(60, 70)]
    assert any("tokens from CPU memory in" in story for story in stories)
    study = cli("kv", chat)
    assert "CPU memory of 4.00 GB find" in " ".join(study.out.split())
    tiers = ("--set", "engine.kv_offloading.size_gb=0.04", "--set", "engine.kv_offloading.storage.shared=true")
    stored = cli("simulate", chat, *tiers, "--json", out)
    assert "Prompt tokens from storage %" in stored.out
    (result,) = summaries(out).values()
    both = result["summary"]["prefix_cache"]
    assert 0 < both["storage_share"]["value"] <= both["loaded_share"]["value"]
    assert both["loaded_share"]["value"] == pytest.approx(cache["loaded_share"]["value"], rel=0.1)
    stories = [cli("explain", chat, *tiers, "--request", number).out for number in range(60, 80)]
    assert any("of them read from storage before" in story for story in stories)
    small = cli("simulate", chat, "--set", "engine.kv_offloading.size_gb=0.01")
    assert small.code == 2
    assert "kv_offloading.size_gb must hold one sequence of max_model_len 1024 tokens" in small.err
    off = cli("simulate", chat, "--set", "engine.enable_prefix_caching=false")
    assert "kv_offloading needs enable_prefix_caching = true" in off.err


ROW = {"timestamp": 0, "input_length": 600, "output_length": 5}
CALL = {"output_length": 5, "delay": 30}
TRACES = {
    "hash ids without lengths": ([{"timestamp": 0, "hash_ids": [1, 2]}], "input_length"),
    "more hash ids than the prompt has blocks": ([ROW | {"hash_ids": [1, 2, 3]}], "it has 3 hash_ids"),
    "a parent that is missing": (
        [ROW | {"request_id": "a"}, ROW | {"request_id": "b", "wait_for": ["c"]}],
        "'c', which is no request_id of this file",
    ),
    "a parent that comes later": (
        [ROW | {"request_id": "a", "wait_for": ["b"]}, ROW | {"request_id": "b"}],
        "'b', which must come before it in the file",
    ),
    "a turn before that is missing": (
        [ROW | {"request_id": "a", "delay": 0}, ROW | {"request_id": "b", "wait_for": ["a"], "previous_turn": "c"}],
        "'c', which is no request_id of this file",
    ),
    "a prompt shorter than the turn before it": (
        [ROW | {"request_id": "a"}, ROW | {"request_id": "b", "wait_for": ["a"], "previous_turn": "a"}],
        "input_length must exceed the 605 tokens of the prompt and output of the turn before it; it is 600",
    ),
}


def refused(finished, words):
    """Check that a command ends with one clear message."""
    assert (finished.code, finished.out) == (2, "")
    errors = [line for line in finished.err.splitlines() if line.startswith("error")]
    assert len(errors) == 1
    assert words in finished.err
    assert "Traceback" not in finished.err


@pytest.mark.parametrize(("rows", "words"), TRACES.values(), ids=TRACES)
def test_a_trace_that_contradicts_itself_is_refused(cli, chat, tmp_path, rows, words):
    trace = tmp_path / "calls.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    replay = tmp_path / "replay.toml"
    replay.write_text('[workload]\ntrace = "calls.jsonl"\nformat = "mooncake"\n' + CHAT[CHAT.index("[deployment]") :])
    refused(cli("simulate", replay), words)


@pytest.mark.parametrize("router", ["cache_aware", "prefix_precise", "uncached_work", "uncached_load"])
def test_a_router_that_needs_prefixes_is_refused_without_them(cli, tmp_path, router):
    (tmp_path / "plain.toml").write_text(PLAIN)
    finished = cli("simulate", tmp_path / "plain.toml", "--set", f"scheduler.router={router}")
    refused(finished, "this workload has none; take a trace with hash_ids, or sessions")


def test_the_router_of_the_gateway_is_refused_by_name(cli, chat):
    finished = cli("simulate", chat, "--set", "scheduler.router=earliest_finish")
    refused(finished, "earliest_finish is a router of the gateway; the simulator has cache_aware, central, ")


SEARCH = """
[search]
limits = { "ttft.p99" = "1s" }
seeds = 1
precision = 0.5
[search.space]
replicas = [2]
router = ["least_outstanding", "session_affinity"]
"""


@pytest.mark.parametrize("command", ["simulate", "search", "capacity", "explain"])
def test_a_router_that_needs_sessions_is_refused_where_no_request_follows_another(cli, tmp_path, command):
    """With system prompts in common, and with a trace of shared blocks, every command ends before its first run."""
    groups = CHAT.replace("session_rate", "request_rate")
    groups = groups[: groups.index("[workload.sessions]")] + groups[groups.index("[deployment]") :]
    (tmp_path / "calls.jsonl").write_text(2 * (json.dumps(ROW | {"hash_ids": [1, 2]}) + "\n"))
    trace = '[workload]\ntrace = "calls.jsonl"\n' + CHAT[CHAT.index("[deployment]") :]
    for text in (groups, trace):
        path = tmp_path / "scenario.toml"
        path.write_text(text.partition("[[variants]]")[0] + "enable_prefix_caching = true\n" + SEARCH)
        more = {"explain": ["--request", "0"], "search": ["--jobs", "1"]}.get(command, [])
        over = [] if command == "search" else ["--set", "scheduler.router=session_affinity"]
        finished = cli(command, path, *more, *over)
        refused(finished, "this workload has no session of several requests; take a trace that names sessions")


def test_a_draw_without_a_later_turn_by_chance_is_no_error(cli, chat):
    """Of 40 seeds of three requests, most have three sessions of one turn."""
    settings = ["scheduler.router=session_affinity", "workload.num_requests=3", "run.seeds=40", "run.model_draws=0"]
    settings += ["workload.sessions.turns=1.2", "deployment.replicas=2"]
    text = chat.read_text()
    chat.write_text(text[: text.index("[workload.groups]")] + text[text.index("[workload.sessions]") :])
    finished = cli("simulate", chat, "--variant", "cached", *(part for one in settings for part in ("--set", one)))
    assert finished.code == 0, finished.err


def test_a_router_that_needs_the_cache_is_refused_without_it(cli, chat):
    finished = cli("simulate", chat, "--variant", "computed", "--set", "scheduler.router=cache_aware")
    refused(finished, "set engine.enable_prefix_caching = true")


def test_a_prefix_cache_that_is_off_is_named(cli, chat):
    rules = ["engine.prefix_cache=sglang", "engine.radix_eviction_policy=lfu"]
    settings = ["workload.num_requests=20", "run.model_draws=0", *rules]
    arguments = ["simulate", chat, *(part for one in settings for part in ("--set", one))]
    note = "engine.prefix_cache has no effect, because the cache is off; set engine.enable_prefix_caching = true"
    assert note not in cli(*arguments).err  # a variant turns it on
    chat.write_text(CHAT.partition("[[variants]]")[0])
    off = cli(*arguments)
    assert off.code == 0
    assert off.err.count(note) == 1


def test_block_sizes_must_divide_each_other(cli, tmp_path):
    trace = tmp_path / "calls.jsonl"
    trace.write_text(json.dumps(ROW | {"hash_ids": [1, 2]}) + "\n")
    replay = tmp_path / "replay.toml"
    replay.write_text('[workload]\ntrace = "calls.jsonl"\n' + CHAT[CHAT.index("[deployment]") :])
    finished = cli("simulate", replay, "--variant", "cached", "--set", "engine.block_size=48")
    refused(finished, "must divide the 512 tokens of a shared block")


def test_compare_pairs_the_same_sessions_under_two_policies_and_shows_their_cached_tokens(cli, tmp_path):
    path, page, out = (tmp_path / name for name in ("chat.toml", "compare.html", "compare.json"))
    text = CHAT.partition("[[variants]]")[0].replace("[deployment]", "[deployment]\nreplicas = 2")
    text = text.replace("[engine]", "[engine]\nenable_prefix_caching = true")
    routers = {"affine": "session_affinity", "turns": "round_robin"}
    variants = (f'[[variants]]\nname = "{name}"\nscheduler.router = "{router}"\n' for name, router in routers.items())
    path.write_text(text + "".join(variants))
    finished = cli("simulate", path, "--records", tmp_path / "run.parquet", "--quiet")
    assert finished.code == 0, finished.err
    runs = [tmp_path / f"run-{one}.parquet" for one in routers]
    finished = cli("compare", *runs, "--json", out, "--report", page)
    assert finished.code == 0, finished.err
    assert "Prompt tokens cached %" in finished.out
    assert "Prompt tokens cached" in page.read_text()
    found = json.loads(out.read_text())
    assert found["paired"]
    assert not any("work" in warning for warning in found["warnings"])
    share = found["errors"]["hit_rate"]
    assert 1 > share["a"] > share["b"] > 0
    assert share["low"] > 0
