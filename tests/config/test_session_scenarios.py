"""Scenarios with sessions, groups with a shared system prompt, and tools."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lengthwise import config
from lengthwise.schema.errors import InputError
from lengthwise.usecases import requests, schedule, simulate

BASE = """
[deployment]
model = "llama-2-7b"
gpu = "A100-80GB"
[workload]
num_requests = 300
"""
LENGTHS = 'prompt = 50\noutput = { kind = "uniform", low = 5, high = 60 }\n'
CHAT = BASE + LENGTHS + "session_rate = 2.0\n"


def drawn(text: str, seed: int = 0):
    return requests.workload_by_seed(config.loads(text))(seed)


def test_a_chat_has_groups_turns_and_think_time():
    w = drawn(CHAT + 'sessions = { turns = 4, think_time = "8s" }\ngroups = { count = 3, system_prompt = 100 }\n')
    assert len(w) == 300
    first = w.extra["turn"] == 0
    assert (w.prompt_tokens[first] == 150).all()
    assert set(w.after.delay_s[~first]) == {8.0}
    assert w.prefixes.block_tokens == 16
    assert (np.diff(w.prefixes.start)[first] == 6).all()
    gaps = np.diff(np.unique(w.arrival_s))
    assert gaps.mean() == pytest.approx(0.5, rel=0.3)


def test_agents_and_lognormal_times():
    tools = (
        'tools = { calls = 3, time = { median = "2s", sigma = 0.5 }, tokens = 30, fan_out = 2, fan_out_share = 0.5 }\n'
    )
    w = drawn(CHAT + tools)
    later = w.extra["turn"] > 0
    assert 1.5 < np.median(w.after.delay_s[later & (w.after.delay_s > 0)]) < 2.7
    assert np.diff(w.after.start).max() == 3


def test_groups_alone_are_single_requests_of_any_load():
    groups = "groups = { count = 3, system_prompt = 64, zipf = 0 }\n"
    open_loop = drawn(BASE + LENGTHS + "request_rate = 2.0\n" + groups)
    closed = drawn(BASE + LENGTHS + "concurrency = 4\n" + groups)
    assert (open_loop.after, closed.after, closed.concurrency) == (None, None, 4)
    assert (np.diff(open_loop.prefixes.start) == 4).all()


def test_blocks_of_system_prompts_suit_the_engine():
    text = CHAT + "groups = { count = 2, system_prompt = 100 }\nsessions = { turns = 2 }\n[engine]\nblock_size = {}\n"
    sizes = [drawn(text.replace("{}", str(size))).prefixes.block_tokens for size in (1, 8, 16, 32, 24)]
    assert sizes == [16, 16, 16, 16, 24]


def test_a_cache_saves_the_context():
    text = CHAT + "sessions = { turns = 4 }\ngroups = { count = 3, system_prompt = 600 }\n"
    found = config.loads(
        text + "[[variants]]\nname = 'cache'\nengine.enable_prefix_caching = true\n[[variants]]\nname = 'none'\n"
    )
    with_cache, without = (one.records.requests for one in simulate.run(found, jobs=1))
    assert with_cache.cached_tokens.sum() > 0.5 * with_cache.prompt_tokens.sum()
    assert without.cached_tokens.sum() == 0


def test_predictors_learn_from_the_prompts_of_sessions():
    w = drawn(CHAT + "sessions = { turns = 4 }\n[predictor]\nkind = 'bucket_ecdf'\n")
    assert w.predictions is not None
    assert w.after is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CHAT, r"session_rate is the rate of \[workload.sessions\] or \[workload.tools\]; give one of them"),
        (CHAT + "groups = { count = 1, system_prompt = 5 }\n", "groups alone have none: give request_rate"),
        (CHAT + "sessions = { turn = 2 }\n", r"turn.*turns"),
        (CHAT + "sessions = { turns = 0.5 }\n", "turns"),
        (CHAT + "sessions = { think_time = '5 parsecs' }\n", "must be seconds"),
        (CHAT + "tools = { calls = 2, tokens = { kind = 'fixd', tokens = 3 } }\n", "fixed"),
        (CHAT + "groups = { system_prompt = 5 }\nsessions = { turns = 2 }\n", "count"),
        (CHAT + "concurrency = 3\nsessions = { turns = 2 }\n", "excludes session_rate"),
        (BASE + LENGTHS + "request_rate = 1.0\nsessions = { turns = 2 }\n", "leave out request_rate"),
        (BASE + LENGTHS + "concurrency = 1\ntools = { calls = 2 }\n", "leave out concurrency"),
        (BASE + "preset = 'chat-1m'\nsessions = { turns = 2 }\n", "say how sessions start: session_rate"),
        (BASE + LENGTHS + "arrivals = 'poisson'\nsessions = { turns = 2 }\n", "kind poisson needs session_rate"),
        (BASE + "trace = 't.csv'\nsessions = { turns = 2 }\n", "sessions describes drawn requests, and a replayed"),
        (
            BASE + "trace = 't.json'\nrequest_rate = 1.0\nformat = 'sharegpt_turns'\n",
            "at their own times; leave out request_rate",
        ),
    ],
)
def test_mistakes(text, message):
    with pytest.raises(InputError, match=message):
        config.loads(text)


def test_a_schedule_refuses_sessions():
    with pytest.raises(InputError, match=r"a schedule does not support workload.sessions, groups and tools yet"):
        schedule.task_of(config.loads(CHAT + "sessions = { turns = 2 }\n"))


def test_a_schedule_refuses_a_trace_with_sessions(tmp_path):
    rows = ((0, 600, 5, {"session_id": 1}), (None, 700, 5, {"session_id": 1, "delay": 500}))
    with pytest.raises(InputError, match=r"a schedule does not support requests that wait for others yet.* in t do"):
        schedule.task_of(config.loads(trace(tmp_path, *rows)))


def test_a_schedule_of_a_trace_notes_that_it_uses_no_shared_prefixes(tmp_path):
    rows = [(10 * i, 600 + i, 5 + i % 7, {"hash_ids": [1, i + 2]}) for i in range(40)]
    plan = schedule.plan_schedule(config.loads(trace(tmp_path, *rows) + "[schedule]\nlatency_bound = '60s'\n"))
    assert any("share prefixes; a schedule computes each prompt completely" in note for note in plan.uncertainty.notes)


def trace(folder, *rows) -> str:
    path = folder / "t.jsonl"
    path.write_text(
        "".join(
            json.dumps(dict(zip(("timestamp", "input_length", "output_length"), row[:3], strict=True)) | row[3]) + "\n"
            for row in rows
        )
    )
    return BASE.replace("num_requests = 300\n", "") + f"trace = '{path}'\n"


def test_a_replayed_trace_keeps_its_prefixes_and_dependencies(tmp_path):
    rows = ((0, 600, 5, {"hash_ids": [1, 2]}), (10, 700, 5, {"hash_ids": [1, 3]}))
    w = drawn(trace(tmp_path, *rows))
    assert w.prefixes.block_ids.tolist() == [1, 2, 1, 3]
    cut = drawn(trace(tmp_path, *rows) + "max_prompt_tokens = 512\n")
    assert cut.prefixes.block_ids.tolist() == [1, 1]
    turns = ((0, 600, 5, {"session_id": 1}), (10, 700, 5, {"session_id": 1, "delay": 30}), (20, 5, 5, {}))
    w = drawn(trace(tmp_path, *turns))
    assert (w.after.parent.tolist(), w.prefixes.turns.tolist()) == ([0], [-1, 0, -1])
    w = drawn(trace(tmp_path, *turns) + "num_requests = 2\n")
    assert (w.after.parent.tolist(), w.prefixes.turns.tolist()) == ([0], [-1, 0])
    with pytest.raises(InputError, match="cannot shorten sessions, whose later prompts contain the earlier ones"):
        drawn(trace(tmp_path, *turns) + "max_prompt_tokens = 512\n")


def test_conversations_can_be_replayed_as_turns(tmp_path):
    path = tmp_path / "c.json"
    messages = [{"from": "human" if i % 2 == 0 else "gpt", "value": "some words"} for i in range(6)]
    path.write_text(json.dumps([{"conversations": messages}]))
    text = BASE.replace("num_requests = 300\n", "") + f"trace = '{path}'\n"
    assert drawn(text).after is None
    assert drawn(text + "format = 'sharegpt_turns'\n").after.parent.tolist() == [0, 1]
