from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from lengthwise.schema.errors import InputError, TraceError, UnknownNameError
from lengthwise.schema.workload import estimated_tokens
from lengthwise.workload import Samples, read

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
TURNS = "arrived_at,num_prefill_tokens,num_decode_tokens,turn,session\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def lines(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def mooncake(*rows: tuple) -> str:
    return lines(*({"timestamp": t, "input_length": p, "output_length": o} for t, p, o in rows))


def put(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    data = text.encode() if isinstance(text, str) else text
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


# Each of these is the same three requests: at 0, 1.5 and 2 s, of 10/1, 20/2 and 30/3 tokens.
SAME = {
    "azure.csv": AZURE + "2023-11-16 18:15:46.5000000,10,1\n2023-11-16 18:15:48.0000000,20,2\n"
    "2023-11-16 18:15:48.5000000,30,3\n",
    "azure_2024.csv": AZURE + "2024-05-10 00:00:00.500000+00:00,10,1\n2024-05-10 00:00:02+00:00,20,2\n"
    "2024-05-10 00:00:02.500000+00:00,30,3\n",
    "azure_iso.csv": AZURE + "2024-05-10T00:00:00.5Z,10,1\n2024-05-10T00:00:02Z,20,2\n2024-05-10T00:00:02.5Z,30,3\n",
    "azure_ticks.csv": AZURE + "638357553465000000,10,1\n638357553480000000,20,2\n638357553485000000,30,3\n",
    "burst.csv": BURST + "7.5,ChatGPT,10,1,11,API log\n8,GPT-4,9,0,9,API log\n9,GPT-4,20,2,22,API log\n"
    "9.5,ChatGPT,30,3,33,API log\n",
    "vidur.csv": VIDUR + "3,10,1\r\n4.5,20,2\r\n5,30,3",
    "vidur.csv.gz": "﻿" + VIDUR + "0,10,1\n1.5,20,2\n2,30,3\n",
    "vidur_ms.csv": VIDUR.replace("arrived_at", "arrival_ms") + "3000,10,1\n4500,20,2\n5000,30,3\n",
    "splitwise.csv": "request_id,request_type,application_id,arrival_timestamp,batch_size,"
    "prompt_size,token_size\n"
    "0,2,0,1.0,1,10,1\n1,2,0,2.5,1,20,2\n2,2,0,3.0,1,30,3\n",
    "mooncake.jsonl": mooncake((500, 10, 1), (2000, 20, 2), (2500, 30, 3)),
    "aibrix.jsonl.gz": lines(
        {"timestamp_ms": 6, "prompt_length": 10, "output_length": 1, "prompt": "a"},
        {"timestamp_ms": 7, "prompt_length": 9, "output_length": 0, "prompt": "b"},
        {"timestamp_ms": 1506, "prompt_length": 20, "output_length": 2, "prompt": "c"},
        {"timestamp_ms": 2006, "prompt_length": 30, "output_length": 3, "prompt": "d"},
    ),
    "sim.jsonl": lines(
        {"input_toks": 10, "output_toks": 1, "arrival_time_ns": 10**9, "input_tok_ids": [1, 2]},
        {"input_toks": 20, "output_toks": 2, "arrival_time_ns": 25 * 10**8, "input_tok_ids": []},
        {"input_toks": 30, "output_toks": 3, "arrival_time_ns": 3 * 10**9, "input_tok_ids": [3]},
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_every_row_format_is_found_and_read(tmp_path, name):
    got = read(put(tmp_path, name, SAME[name]))
    np.testing.assert_allclose(got.arrival_s, [0, 1.5, 2], atol=1e-9)
    assert got.prompt_tokens.tolist() == [10, 20, 30]
    assert got.output_tokens.tolist() == [1, 2, 3]
    assert got.name.startswith(name.split(".")[0])


def test_extra_columns_of_a_format_are_retained(tmp_path):
    burst = read(put(tmp_path, "b.csv", SAME["burst.csv"]))
    assert burst.extra["class"].tolist() == ["ChatGPT", "GPT-4", "ChatGPT"]
    assert burst.name == "b (without 1 empty)"
    aibrix = read(put(tmp_path, "a.jsonl", SAME["aibrix.jsonl.gz"]))
    assert aibrix.extra["prompt"].tolist() == ["a", "c", "d"]
    rows = [
        {"timestamp": 0, "input_length": 900, "output_length": 1, "hash_ids": [4, 5], "priority": 2},
        {"timestamp": 1, "input_length": 900, "output_length": 1, "hash_ids": [], "priority": 0},
        {"timestamp": 2, "input_length": 900, "output_length": 1, "hash_ids": [4, 6], "priority": 1},
    ]
    moon = read(put(tmp_path, "m.jsonl", lines(*rows)))
    assert (moon.prefixes.block_tokens, moon.prefixes.start.tolist()) == (512, [0, 2, 2, 4])
    assert moon.prefixes.block_ids.tolist() == [4, 5, 4, 6]
    assert moon.priority.tolist() == [2, 0, 1]


def test_sessions_become_codes(tmp_path):
    text = (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "1,x9,2,GPT-4,5,5,10,Conversation log\n2,,1,GPT-4,5,5,10,API log\n"
        "3,b,1,GPT-4,5,5,10,Conversation log\n"
        "4,x9,1,GPT-4,5,5,10,Conversation log\n"
    )
    assert read(put(tmp_path, "b.csv", text)).extra["session"].tolist() == [0, -1, 1, 0]
    text = "arrived_at,num_prefill_tokens,num_decode_tokens,session\n0,5,5,x9\n1,5,5,\n2,5,5,b\n3,5,5,x9\n"
    assert read(put(tmp_path, "v.csv", text)).extra["session"].tolist() == [0, -1, 1, 0]


def test_a_csv_file_has_turns_priorities_and_exact_lengths(tmp_path):
    columns = "arrived_at,num_prefill_tokens,num_decode_tokens,session,turn,priority,max_tokens,ignore_eos\n"
    w = read(put(tmp_path, "v.csv", f"{columns}0,5,5,a,0,2,,\n1,5,6,a,1,,6,true\n2,5,5,,,-1,9,false\n"))
    assert (w.extra["session"].tolist(), w.extra["turn"].tolist()) == ([0, 0, -1], [0, 1, 0])
    assert w.priority.tolist() == [2, 0, -1]
    assert w.max_tokens[1:].tolist() == [6, 9]
    assert w.ignore_eos.tolist() == [False, True, False]


def test_requests_of_a_turn_run_together_and_rows_of_a_time_have_any_order(tmp_path):
    rows = "0,5,5,1,a\n0,5,5,0,a\n0,5,5,,b\n1,5,5,1,a\n2,5,5,2,a\n3,5,5,1,a\n4,5,5,1,b\n"
    assert read(put(tmp_path, "t.csv", TURNS + rows)).extra["turn"].tolist() == [1, 0, 0, 1, 2, 1, 1]
    first, *others = rows.splitlines(keepends=True)
    path = put(tmp_path, "t.csv", TURNS + "".join([*others[::-1], first]))
    assert read(path, sort=True).extra["turn"].tolist() == [0, 0, 1, 1, 2, 1, 1]


def test_lengths_without_times_arrive_at_once_and_are_named_so(tmp_path):
    got = read(put(tmp_path, "l.csv", "num_prefill_tokens,num_decode_tokens,pd_ratio\n5,6,0.8\n7,8,0.9\n"))
    assert got.arrival_s.tolist() == [0, 0]
    assert got.name == "l (lengths only: all at once)"
    prompt, output = Samples.of(got).sample(40, np.random.default_rng(0))
    assert set(zip(prompt, output, strict=True)) == {(5, 6), (7, 8)}


def test_scale_limit_and_order(tmp_path):
    path = put(tmp_path, "v.csv", VIDUR + "4,30,3\n3,10,1\n4,40,4\n3,20,2\n")
    with pytest.raises(TraceError, match=r"v\.csv, line 3: arrives before the row above it.*sort=True"):
        read(path)
    got = read(path, sort=True, time_scale=0.5, max_requests=3)
    assert got.arrival_s.tolist() == [0, 0, 0.5]
    assert got.prompt_tokens.tolist() == [10, 20, 30]  # those of one time in the order of the file


# name, content, what the message must say after the file's name.
BAD = [
    ("e.csv", "", "the file is empty"),
    ("e.csv.gz", "\n", "the file is empty"),
    ("h.csv", VIDUR, "holds no request"),
    ("h.csv", "a,b\n1,2\n", "line 1: of no known format, with 'a, b' in the first line; the nearest"),
    ("h.csv", "TIME,ContextTokens,Generated\n", "; the nearest, azure, has TIMESTAMP, ContextTokens, GeneratedTokens"),
    ("h.json", '{"a": 1}\n', "line 1: of no known format, with 'a'"),
    ("n.csv", VIDUR + "0,10,1\n1,NaN,1\n", "line 3: num_prefill_tokens must be a whole number .* it is 'NaN'"),
    ("n.csv", VIDUR + "0,10,1\nnan,5,1\n", "line 3: arrived_at must be a time from 0 up; it is 'nan'"),
    ("n.csv", VIDUR + "0,10,1\ninf,5,1\n", "line 3: arrived_at must be a time from 0 up; it is 'inf'"),
    ("n.csv", VIDUR + "-1,10,1\n0,5,1\n", "line 2: arrived_at must be a time from 0 up; it is '-1'"),
    ("n.csv", VIDUR + "0,10,1\n1,-5,1\n", "line 3: num_prefill_tokens .* from 1 up; it is '-5'"),
    ("n.csv", VIDUR + "0,10,1\n1,5,0\n", "line 3: num_decode_tokens .* from 1 up; it is '0'"),
    ("n.csv", VIDUR + "0,10,1\n1,5,1.5\n", "line 3: num_decode_tokens .* it is '1.5'"),
    ("n.csv", VIDUR + "0,10,1\n1,5,1e300\n", "line 3: num_decode_tokens .* it is '1e300'"),
    ("n.csv", VIDUR + "0,10,1\n1,abc,1\n", "line 3: num_prefill_tokens .* it is 'abc'"),
    ("n.csv", VIDUR + "0,10,1\n1,,1\n", "line 3: num_prefill_tokens .* it is missing"),
    ("n.csv", VIDUR + "0,10,1\n1,5", r"line 3: a row must have 3 cells; this one has 2 \(cut off\?\)"),
    ("n.csv", VIDUR + "0,10,1\n1,5,6,7\n", "line 3: a row must have 3 cells; this one has 4"),
    ("n.csv", VIDUR + "0,10,1\n\n1,5,6\n", "line 3: a row must have 3 cells; this one has 0"),
    ("t.csv", VIDUR[:-1] + ",turn\n0,5,5,0\n", "line 1: a column turn needs a column session"),
    ("t.csv", VIDUR[:-1] + ",turn,session\n0,5,5,0,a\n1,5,5,-1,a\n", "line 3: turn must be .* from 0 up; it is '-1'"),
    ("t.csv", VIDUR[:-1] + ",turn,session\n0,5,5,first,a\n", "line 2: turn must be .* from 0 up; it is 'first'"),
    ("t.csv", TURNS + "0,5,5,0,a\n1,5,5,0,a\n2,5,5,7,a\n", "line 4: turn must be at most 1 here, .*; it is 7. Number"),
    ("t.csv", TURNS + "0,5,5,0,a\n1,5,5,5,b\n", "line 3: turn must be 0 in the first row of a session.*; it is 5"),
    ("t.csv", TURNS + "0,5,5,0,\n1,5,5,1,\n", "line 3: turn must be 0 .* and in a row without a session; it is 1"),
    ("t.csv", VIDUR[:-1] + ",priority\n0,5,5,high\n", "line 2: priority must be a whole number; it is 'high'"),
    ("t.csv", VIDUR[:-1] + ",ignore_eos\n0,5,5,yes\n", "line 2: ignore_eos must be true or false; it is 'yes'"),
    ("t.csv", VIDUR[:-1] + ",max_tokens,ignore_eos\n0,5,5,6,true\n", "line 2: with ignore_eos, .* they are 5 and 6"),
    ("t.csv", VIDUR[:-1] + ",hash_ids\n0,5,5,1\n", "line 1: the format vidur has no column hash_ids; .* of Mooncake's"),
    ("a.csv", AZURE[:-1] + ",session\n", "line 1: the format azure has no column session; CSV files with num_prefill"),
    ("a.csv", AZURE + "yesterday,5,6\n", "line 2: TIMESTAMP must be a date; it is 'yesterday'"),
    ("a.csv", AZURE + "2023-11-16 18:15:46.5,5,6\n2023-13-16 18:15:46.5,5,6\n", "line 3: TIMESTAMP must"),
    ("b.csv", BURST + "0,GPT-4,5,-1,4,API log\n", "line 2: Response tokens .* from 0 up; it is '-1'"),
    ("b.csv", BURST + "0,GPT-4,5,0,5,API log\n", "holds no request"),
    ("m.jsonl", mooncake((0, 5, 5)) + '{"timestamp": 1, "inp', "line 2: not a JSON object, or cut off"),
    ("m.jsonl", mooncake((0, 5, 5)) + "\n[1]\n", r"line 3: must be a JSON object; it is \[1\]"),
    ("m.jsonl", mooncake((0, 5, 5), (1, "7", 5)), "line 2: input_length .* it is '7'"),
    ("m.jsonl", mooncake((0, 5, 5), (1, True, 5)), "line 2: input_length .* it is True"),
    ("m.jsonl", mooncake((0, 5, 5), (None, 4, 5)), "line 2: timestamp must be a time from 0 up; it is missing"),
    ("m.jsonl", mooncake((0, 5, 5), (float("nan"), 4, 5)), "line 2: timestamp must .* it is nan"),
    ("m.jsonl", mooncake((0, 5, 5), (9, 4, 5), (3, 4, 5)), "line 3: arrives before the row above it"),
    ("s.json", '[{"conversations": [', "line 1: not JSON, or cut off"),
    ("s.json", "[3]", "entry 1 must be an object; it is 3"),
    ("s.json", '[{"conversations": []}]', "no conversation in it has an answered message"),
    ("s.json", '[{"id": 3}]', "each entry must hold a list named conversations"),
    ("p.parquet", b"PAR1 and not much more", "the Parquet file is cut off or damaged"),
    ("p.parquet", "hello", "the Parquet file is cut off or damaged"),
]


@pytest.mark.parametrize(("name", "text", "message"), BAD)
def test_bad_files_name_file_line_and_value(tmp_path, name, text, message):
    path = put(tmp_path, name, text)
    with pytest.raises(TraceError, match=f"{name}.*{message}") as error:
        read(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_truncated_gzip_file_is_reported(tmp_path):
    complete = gzip.compress((VIDUR + "0,10,1\n" * 500).encode())
    for keep in (-12, 30):
        (tmp_path / "t.csv.gz").write_bytes(complete[:keep])
        with pytest.raises(TraceError, match=r"t\.csv\.gz: the gzip file is cut off or damaged"):
            read(tmp_path / "t.csv.gz")


def test_a_missing_file_is_reported(tmp_path):
    with pytest.raises(TraceError, match=r"no\.csv: cannot be read \(No such file"):
        read(tmp_path / "no.csv")


def test_a_format_can_be_forced_and_must_fit(tmp_path):
    path = put(tmp_path, "v.csv", SAME["vidur.csv"])
    assert len(read(path, "vidur")) == 3
    with pytest.raises(TraceError, match="line 1: the format azure needs TIMESTAMP, ContextTokens"):
        read(path, "azure")
    with pytest.raises(UnknownNameError, match=r"no trace format named 'vidurr'\. Did you mean: vidur"):
        read(path, "vidurr")
    with pytest.raises(InputError, match="time_scale"):
        read(path, time_scale=0)
    with pytest.raises(InputError, match="max_requests"):
        read(path, max_requests=0)


CHAT = [
    {
        "id": "x",
        "conversations": [
            {"from": "system", "value": "s" * 8},
            {"from": "human", "value": "h" * 40},
            {"from": "gpt", "value": "g" * 4},
            {"from": "gpt", "value": "unasked "},
            {"from": "human", "value": "i" * 8},
            {"from": "gpt", "value": ""},
            {"from": "human", "value": "retry"},
            {"from": "gpt", "value": "j" * 9},
        ],
    },
    {"conversations": [{"role": "user", "content": "問い"}, {"role": "assistant", "content": "答え"}]},
]


@pytest.mark.parametrize("text", [json.dumps(CHAT), lines(*CHAT)])
def test_sharegpt_counts_the_history_and_skips_unrequested_turns(tmp_path, text):
    got = read(put(tmp_path, "chat.json", text))
    turns = [t.get("value", t.get("content")) for t in CHAT[0]["conversations"] if isinstance(t, dict)]
    tokens = [estimated_tokens(t) if t else 0 for t in turns]
    last = len(tokens) - 1
    assert got.prompt_tokens.tolist() == [sum(tokens[:2]), sum(tokens[:last]), estimated_tokens("問い")]
    assert got.output_tokens.tolist() == [tokens[2], tokens[last], estimated_tokens("答え")]
    assert got.extra["session"].tolist() == [0, 0, 1]
    assert got.extra["prompt"].tolist()[::2] == ["\n\n".join(turns[:2]), "問い"]
    assert got.extra["prompt"][1].endswith("retry")
    assert got.extra["output"].tolist() == [turns[2], "j" * 9, "答え"]
    assert got.name == "chat (tokens estimated)"
    counted = read(tmp_path / "chat.json", count_tokens=len)
    assert counted.output_tokens.tolist() == [4, 9, 2]
    assert counted.name == "chat"


RECORDED = {
    # file: requests, seconds, mean prompt, mean output
    "azure_llm_2023_conv.csv.gz": (19_366, 3501.7, 1154.7, 211.1),
    "mooncake_conversation_trace.jsonl.gz": (12_031, 3537.0, 12035.1, 342.6),
    "aibrix_sharegpt_8min_up_and_down.jsonl.gz": (2024, 455.9, 293.5, 73.4),
    "llmservingsim_sharegpt-llama-3.1-8b-300-sps10.jsonl.gz": (300, 29.1, 857.5, 652.5),
    "lengths_arxiv_summarization_llama2tok.csv.gz": (28_257, 0, 2588.1, 291.4),
    "lengths_sharegpt_8k_llama2tok.csv.gz": (30_731, 0, 2340.0, 438.7),
}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_traces(shared, name):
    got = read(shared(f"data/traces/{name}"))
    requests, seconds, prompt, output = RECORDED[name]
    assert len(got) == requests
    assert got.arrival_s[-1] == pytest.approx(seconds, abs=0.1)
    assert got.prompt_tokens.mean() == pytest.approx(prompt, abs=0.1)
    assert got.output_tokens.mean() == pytest.approx(output, abs=0.1)


def test_recorded_block_ids_cover_the_prompts(shared):
    got = read(shared("data/traces/mooncake_conversation_trace.jsonl.gz"))
    assert np.array_equal(np.diff(got.prefixes.start), -(-got.prompt_tokens // 512))


def test_the_estimate_of_tokens_is_as_good_as_stated(shared):
    got = read(shared("data/traces/aibrix_sharegpt_8min_up_and_down.jsonl.gz"))
    estimates = np.array([estimated_tokens(text) for text in got.extra["prompt"]])
    assert estimates.sum() / got.prompt_tokens.sum() == pytest.approx(1, abs=0.15)
    assert np.mean(np.abs(estimates / got.prompt_tokens - 1) < 0.25) > 0.5


NAMES = {"prompt_tokens": "in, all", "output_tokens": "out", "tenant": "team"}
OWN = 'id,ts,"in, all",out,team,session,prompt_tokens\n'


@pytest.mark.parametrize(
    ("arrival", "times"),
    [
        ("arrival_s", ("3", "4.5", "5")),
        ("arrival_ms", ("3000", "4500", "5000")),
        ("arrival_date", ("2026-05-01 10:00:00", "2026-05-01 10:00:01.5", "2026-05-01 10:00:02")),
    ],
)
def test_columns_of_any_name_are_read_under_the_names_given_to_them(tmp_path, arrival, times):
    rows = "".join(f"{i},{at},{10 * i},{i},t{i % 2},s,7\n" for i, at in enumerate(times, 1))
    path = put(tmp_path, "own.csv", OWN + "0,0,5,0,t1,s,7\n" * (arrival != "arrival_date") + rows)
    found = read(path, {arrival: "ts", **NAMES})
    assert found.arrival_s == pytest.approx([0, 1.5, 2])
    assert (found.prompt_tokens.tolist(), found.output_tokens.tolist()) == ([10, 20, 30], [1, 2, 3])  # none of 0 tokens
    assert found.tenant.tolist() == [0, 1, 0]
    assert found.extra["session"].tolist() == [0, 0, 0]  # a column that has our name already
    at_once = read(path, NAMES)
    assert not at_once.arrival_s.any()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt_tokens": "in", "output_tokens": "out"}, "must have the column 'in'.*ts, in, all, out"),
        ({"prompt_tokens": "in, all"}, "name that of output_tokens"),
        (NAMES | {"tenant": "out"}, "each column one name"),
        (NAMES | {"arrival_s": "ts", "arrival_ms": "id"}, "arrivals one column"),
        (NAMES | {"prompt": "in, all"}, "no column named 'prompt'"),
        ({"prompt_tokens": "in, all", "output_tokens": "team"}, "line 2: output_tokens must be a whole number"),
    ],
)
def test_columns_that_cannot_be_read_are_named(tmp_path, columns, message):
    with pytest.raises(InputError, match=message):
        read(put(tmp_path, "own.csv", OWN + "1,0,10,1,a,s,7\n"), columns)
    with pytest.raises(TraceError, match="no header of a CSV file"):
        read(put(tmp_path, "own.jsonl", mooncake((0, 1, 1))), NAMES)
