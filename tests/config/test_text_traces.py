"""Traces with texts: what a trained predictor reads is there when it is asked."""

from __future__ import annotations

import csv
import gzip
import json

import numpy as np
import pytest

from lengthwise import config, engine, predict
from lengthwise import workload as w
from lengthwise.config.workload import column_notes, read_trace
from lengthwise.schema.errors import InputError, TraceError
from lengthwise.schema.workload import UNCAPPED, estimated_tokens
from lengthwise.usecases import lab, variants
from lengthwise.usecases.requests import search_load
from lengthwise.usecases.simulate import ineffective_options

REQUESTS = {"Name": 5, "Explain": 80, "Compose": 400}
DEPLOYMENT = {"model": "opt-125m", "gpu": "A100-80GB", "num_blocks": 4096}


def log_rows(n=240, seed=0, times=False):
    """Answers whose length follows the first word of the prompt."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(n):
        ask = list(REQUESTS)[rng.integers(len(REQUESTS))]
        tokens = 1 + int(REQUESTS[ask] * rng.lognormal(0, 0.2))
        row = {"model": "own", "prompt": f"{ask} thing {i}", "output_tokens": tokens, "finish_reason": "stop"}
        rows.append(row | ({"timestamp": 1e9 + i / 4} if times else {}))
    return rows


def write_log(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def requested(folder, rest="", **workload):
    table = "".join(f"{key} = {json.dumps(value)}\n" for key, value in workload.items())
    on = "".join(f"{key} = {json.dumps(value)}\n" for key, value in DEPLOYMENT.items())
    return config.loads(f"[workload]\n{table}[deployment]\n{on}{rest}", folder=folder)


def first(complete, seed=0):
    return variants.build(complete)[0].workload(seed)


def test_a_log_is_read_with_its_texts_and_counts(tmp_path):
    rows = [
        {"model": "m", "prompt": "Why?", "output": "Because it is so.", "prompt_tokens": 7},
        {"model": "m", "prompt": "Gone", "finish_reason": "error"},
        {"prompt": "And then?", "output": "Then nothing.", "output_tokens": 9},
    ]
    got = read_trace(write_log(tmp_path / "log.jsonl", rows))
    assert got.prompt_tokens.tolist() == [7, estimated_tokens("And then?")]
    assert got.output_tokens.tolist() == [estimated_tokens("Because it is so."), 9]
    assert got.extra["prompt"].tolist() == ["Why?", "And then?"]
    assert got.extra["output"].tolist() == ["Because it is so.", "Then nothing."]
    assert got.extra["model"].tolist() == ["m", ""]
    assert got.name == "log (2 with tokens estimated, without 1 failed or empty)"


@pytest.mark.parametrize("kind", ["csv", "jsonl", "json", "parquet"])
def test_every_kind_of_file_gives_the_same(tmp_path, kind):
    import polars as pl

    rows = [{"prompt": p, "response": r, "model": "m"} for p, r in (("a b, c", "one\ntwo"), ("d", "three"))]
    path = tmp_path / f"log.{kind}"
    if kind == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif kind == "parquet":
        pl.DataFrame(rows).write_parquet(path)
    elif kind == "json":
        path.write_text(json.dumps(rows))
    else:
        write_log(path, rows)
    got = read_trace(path)
    assert got.extra["prompt"].tolist() == ["a b, c", "d"]
    assert got.extra["output"].tolist() == ["one\ntwo", "three"]
    assert got.extra["model"].tolist() == ["m", "m"]


def test_times_of_a_log_are_replayed_and_without_them_a_rate_is_needed(tmp_path):
    write_log(tmp_path / "log.jsonl", log_rows(12, times=True))
    np.testing.assert_allclose(first(requested(tmp_path, trace="log.jsonl")).arrival_s, np.arange(12) / 4)
    dated = [{"created_at": f"2025-01-01T00:00:0{i}Z", "output_tokens": 3} for i in (0, 2, 1)]
    write_log(tmp_path / "dated.jsonl", dated)
    with pytest.raises(TraceError, match=r"set workload\.sort = true"):
        first(requested(tmp_path, trace="dated.jsonl"))
    assert first(requested(tmp_path, trace="dated.jsonl", sort=True)).arrival_s.tolist() == [0, 1, 2]
    assert len(first(requested(tmp_path, trace="dated.jsonl", request_rate=1.0, num_requests=5))) == 5
    write_log(tmp_path / "bare.jsonl", log_rows(12))
    with pytest.raises(InputError, match=r"give workload\.request_rate"):
        first(requested(tmp_path, trace="bare.jsonl"))


@pytest.mark.parametrize("load", [{"request_rate": 5.0}, {"concurrency": 3}])
def test_texts_are_drawn_with_the_lengths_of_their_row(tmp_path, load):
    rows = log_rows(50)
    write_log(tmp_path / "log.jsonl", rows)
    known = {row["prompt"]: row["output_tokens"] for row in rows}
    got = first(requested(tmp_path, trace="log.jsonl", num_requests=200, **load), seed=3)
    assert [known[text] for text in got.extra["prompt"]] == got.output_tokens.tolist()
    assert len(set(got.extra["prompt"])) > 30


def test_limits_cut_the_text_of_an_output_and_drawing_again_takes_another_text(tmp_path):
    rows = [{"prompt": f"p{n}", "output": "x" * 10 * n, "output_tokens": n} for n in (4, 10)]
    write_log(tmp_path / "log.jsonl", rows)
    keys = {"trace": "log.jsonl", "request_rate": 1.0, "num_requests": 40, "max_output_tokens": 5}
    cut = first(requested(tmp_path, **keys))
    texts = zip(cut.extra["prompt"], cut.extra["output"], strict=True)
    assert {(prompt, len(output)) for prompt, output in texts} == {("p4", 40), ("p10", 50)}
    again = first(requested(tmp_path, **keys, cut="redraw"))
    assert set(again.extra["prompt"]) == {"p4"}
    assert set(again.output_tokens) == {4}


def test_a_search_draws_texts_too(tmp_path):
    rows = log_rows(50)
    write_log(tmp_path / "log.jsonl", rows)
    drawn = search_load(requested(tmp_path, trace="log.jsonl", request_rate=5.0)).draw(0, 30)
    known = {row["prompt"]: row["output_tokens"] for row in rows}
    assert [known[text] for text in drawn.extra["prompt"]] == drawn.output_tokens.tolist()


def test_text_columns_next_to_known_columns_are_retained(tmp_path):
    (tmp_path / "t.csv").write_text(
        "arrived_at,num_prefill_tokens,num_decode_tokens,prompt,response,model\n0,3,4,why,so,m\n1,5,6,who,me,m\n"
    )
    got = w.read(tmp_path / "t.csv")
    assert {name: column.tolist() for name, column in got.extra.items()} == {
        "prompt": ["why", "who"],
        "output": ["so", "me"],
        "model": ["m", "m"],
    }
    w.write(got, tmp_path / "t.parquet")
    assert w.read(tmp_path / "t.parquet").extra["output"].tolist() == ["so", "me"]


def test_an_unknown_file_is_reported_for_both_formats(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("time,in_tok,out_tok\n1,2,3\n")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value) == (
        f"{path}, line 1: must have the columns of a trace, or of a log: prompt_tokens, output_tokens (or texts: "
        "prompt, output) and arrival_s or arrival_ms; it has time, in_tok, out_tok. "
        "Rename your columns, or give --column prompt_tokens=in_tok --column output_tokens=out_tok"
    )
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,5,6\n1,5\n")
    with pytest.raises(InputError, match=r"row 2 must have 3 cells like the header; it has 2 \(cut off\?\)"):
        read_trace(path)
    path.write_text("when_ms,in toks,out_toks\n1,2,3\n")
    with pytest.raises(TraceError, match=r"--column 'prompt_tokens=in toks' .*out_toks --column arrival_ms=when_ms$"):
        read_trace(path)
    path.write_text("arrival,prompt,output\n0,10,20\n1,30,5\n")
    with pytest.raises(InputError, match=r"such as 10\. If they are numbers of tokens, name the column prompt_tokens"):
        read_trace(path)
    path.write_text("arrival_s,prompt_tokens,output_tokens,max_output_tokens\n0,10,20,30\n1,30,5,40\n")
    assert read_trace(path).max_tokens.tolist() == [30, 40]


def test_limits_of_clients_in_a_log_are_read(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("prompt,answer,max_tokens\nwhy so,because it is as it is,50\nwho,me,\nwhat,a b c d e f g h i,1\n")
    got = read_trace(path)
    assert got.max_tokens.tolist() == [50, UNCAPPED, got.output_tokens[2]]  # an estimate of 9 words is above 1
    path.write_text("prompt_tokens,output_tokens,max_tokens\n5,9,20\n6,8,8\n")
    assert read_trace(path).max_tokens.tolist() == [20, 8]
    path.write_text("prompt_tokens,output_tokens,max_tokens\n5,9,-1\n6,8,8\n")
    assert read_trace(path).max_tokens.tolist() == [UNCAPPED, 8]
    path.write_text("prompt_tokens,output_tokens,max_tokens\n5,9,20\n6,8,many\n")
    with pytest.raises(InputError, match=r"row 2: max_tokens must be a whole number .*; it is 'many'"):
        read_trace(path)


def test_the_default_predictor_distinguishes_prompts_of_a_log(tmp_path):
    write_log(tmp_path / "log.jsonl", log_rows(60))
    total = requested(tmp_path, '[predictor]\nkind = "default"\n', trace="log.jsonl", request_rate=2.0, num_requests=60)
    got = first(total)
    assert len(np.unique(got.predicted_tokens.round(3))) > 10


@pytest.mark.slow
def test_a_predictor_trained_on_a_log_closes_part_of_the_gap_on_it(tmp_path):
    """From log to decision: train on one log, ask the laboratory about another."""
    from lengthwise.cli import main

    write_log(tmp_path / "log.jsonl", log_rows(300))
    write_log(tmp_path / "later.jsonl", log_rows(200, seed=1))
    assert main(["predict", "train", str(tmp_path / "log.jsonl"), "--out", str(tmp_path / "mine.lwp")]) == 0
    rest = """
engine = { max_num_seqs = 2, max_model_len = 2048 }
[lab]
policies = ["sjf"]
predictors = [{ kind = "model", file = "mine.lwp", name = "mine" }, { kind = "same", tokens = 100.0 }]
loads = [2.0]
seeds = 3
"""
    head = 'workload = { trace = "later.jsonl", request_rate = 1.0, num_requests = 120 }\n'
    on = 'deployment = { model = "opt-125m", gpu = "A100-80GB", num_blocks = 4096 }\n'
    table = lab.lab(config.loads(head + on + rest.lstrip(), folder=tmp_path), jobs=1)
    closed = {cell.predictor: cell["gap_closed"].value for cell in table.cells if cell.policy == "sjf"}
    assert closed["mine"] > 0.7
    assert abs(closed["same tokens=100"]) < 0.05


def test_learning_from_a_log_and_reading_it_as_a_trace_agree(tmp_path):
    path = write_log(tmp_path / "log.jsonl", log_rows(20))
    samples, got = predict.read(path), read_trace(path)
    assert list(samples.prompts.text) == got.extra["prompt"].tolist()
    np.testing.assert_array_equal(samples.output_tokens, got.output_tokens)


def mean_jct_s(folder, policy, predictor):
    """Of sixty requests of a log that come at once, two at a time."""
    rest = f'engine = {{ max_num_seqs = 2, max_model_len = 2048 }}\n[scheduler]\npolicy = "{policy}"\n{predictor}'
    head = 'workload = { trace = "later.jsonl", arrivals = "all_at_once", num_requests = 60 }\n'
    on = 'deployment = { model = "opt-125m", gpu = "A100-80GB", num_blocks = 4096 }\n'
    variant = variants.build(config.loads(head + on + rest, folder=folder))[0]
    records = engine.simulate(variant.workload(0), variant.deployment, engine="reference").requests
    return float(np.mean(records.finished_s - records.arrival_s))


@pytest.mark.slow
def test_a_simulation_with_a_trained_predictor_is_nearer_to_the_oracle(tmp_path):
    write_log(tmp_path / "log.jsonl", log_rows(300))
    write_log(tmp_path / "later.jsonl", log_rows(200, seed=1))
    predict.save(predict.Lexical().fit(predict.read(tmp_path / "log.jsonl")), tmp_path / "mine.lwp")
    fcfs = mean_jct_s(tmp_path, "vllm_v1", "")
    knows = mean_jct_s(tmp_path, "sjf", '[predictor]\nkind = "oracle"\n')
    own = mean_jct_s(tmp_path, "sjf", '[predictor]\nkind = "model"\nfile = "mine.lwp"\n')
    assert (fcfs - own) / (fcfs - knows) > 0.8


@pytest.mark.parametrize(
    ("header", "near"),
    [
        ("num_prefill_tokens,num_decode_tokens,Prioritty,sesion", {"Prioritty": "priority", "sesion": "session"}),
        ("num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio,Priority", {"Priority": "priority"}),
        ("num_prefill_tokens,num_decode_tokens,priority,priorities,Response", {}),
        ("TIMESTAMP,ContextTokens,GeneratedTokens,note", {}),
        ("Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type", {}),
        ("prompt,output,ouput_tokens", {"ouput_tokens": "output_tokens"}),
        ("ts,prompt_tokens,completion_tokns", {"completion_tokns": "output_tokens", "ts": "arrival_s"}),
        ("request time,prompt,output,latency_s", {"request time": "arrival_s"}),
        ("arrival_s,time_to_first_token,prompt,output", {}),
        ("ts,num_prefill_tokens,num_decode_tokens", {"ts": "arrived_at"}),
        ("timestamp_ms,num_prefill_tokens,num_decode_tokens", {"timestamp_ms": "arrival_ms"}),
        ("arrival_ms,num_prefill_tokens,num_decode_tokens", {}),
        ("arrival_time_ms,prompt_tokens,output_tokens", {}),
        ("ts_ms,prompt_tokens,output_tokens", {"ts_ms": "arrival_ms"}),
        ('{"input_length": 5,"output_lenght": 4}', {}),
    ],
)
@pytest.mark.parametrize("suffix", ["csv", "csv.gz"])
def test_ignored_columns_with_names_close_to_known_ones_are_noted(tmp_path, header, near, suffix):
    path = tmp_path / f"t.{suffix}"
    text = f"{header}\nx\n".encode()
    path.write_bytes(gzip.compress(text) if suffix == "csv.gz" else text)
    assert column_notes(path) == [
        f"{path}: column {one} is ignored; did you mean {name}?" for one, name in near.items()
    ]


def test_all_columns_to_rename_are_named_at_once(tmp_path):
    (path := tmp_path / "t.csv").write_text("ts,in_tok,out_tok\n1,2,3\n")
    with pytest.raises(
        TraceError, match=r"give --column prompt_tokens=in_tok --column output_tokens=out_tok --column arrival_s=ts$"
    ):
        read_trace(path)


@pytest.mark.parametrize(("sign", "name"), [("\t", "tabs"), (";", "semicolons")])
@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_other_separators_than_commas_are_named(tmp_path, sign, name, suffix):
    (path := tmp_path / f"t.{suffix}").write_text(sign.join(("arrival_s", "prompt_tokens", "output_tokens\n1")))
    with pytest.raises(TraceError, match=f"columns must be separated by commas; {name} separate arrival_s, prompt"):
        read_trace(path)


def test_a_folder_is_named_as_one(tmp_path):
    with pytest.raises(TraceError, match="is a folder; give a file, or a ServeGen folder"):
        read_trace(tmp_path)


def test_requests_that_a_simulation_leaves_out_are_counted(tmp_path):
    rows = "".join(f"{at},10,{at % 3}\n" for at in range(9))
    (tmp_path / "log.csv").write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}")
    text = 'workload.trace = "log.csv"\ndeployment = { model = "llama-3-8b", gpu = "L40S" }\n'
    notes = ineffective_options(variants.build(config.loads(text, folder=tmp_path)), 1)
    assert notes == ["log has 3 requests that failed or have 0 tokens; they were left out"]


def test_a_file_that_cannot_be_read_has_no_notes_on_columns(tmp_path):
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(b"num_prefill_tokens,num_decode_tokens,prioritty\n")[:20])
    assert [column_notes(path) for path in (tmp_path, tmp_path / "none.csv", tmp_path / "cut.csv.gz")] == [[], [], []]
