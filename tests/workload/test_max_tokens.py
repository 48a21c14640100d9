"""The limits of outputs that clients send: max_tokens and ignore_eos."""

from __future__ import annotations

import json
from dataclasses import replace
from math import ceil
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.schema.errors import InputError, TraceError
from lengthwise.schema.workload import UNCAPPED, Workload
from lengthwise.workload import (
    Capped,
    ClientLimits,
    Fixed,
    Joint,
    LogNormal,
    Poisson,
    Samples,
    Sessions,
    Tools,
    Uniform,
    draw,
    generate,
    generate_sessions,
    read,
    write,
)

CHAT = Joint(LogNormal(300, 1), LogNormal(200, 1))
LIMITED = Workload(
    np.array([0.0, 1.0, 2.0]), np.array([10, 20, 30]), np.array([5, 64, 8]), max_tokens=np.array([9, 64, UNCAPPED]),
    ignore_eos=np.array([False, True, False]),
)  # fmt: skip


def put(folder: Path, name: str, *rows: dict) -> Path:
    path = folder / name
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"max_tokens": [9, 8]}, "request 1 has 9 output tokens and max_tokens 8"),
        ({"max_tokens": [9, 2 * UNCAPPED]}, "at most 1000000000000"),
        ({"max_tokens": [9.5, 9]}, "max_tokens must be whole numbers"),
        ({"max_tokens": [9]}, "one value for each request"),
        ({"ignore_eos": [True, False]}, "ignore_eos needs max_tokens"),
        ({"max_tokens": [9, 12], "ignore_eos": [False, True]}, "request 1 has 9 output tokens and max_tokens 12"),
    ],
)
def test_an_output_ends_at_its_limit(columns, message):
    with pytest.raises(InputError, match=message):
        Workload([0.0, 0.0], [4, 4], [3, 9], **columns)


def test_rows_are_taken_with_their_limits():
    taken = LIMITED.take(np.array([1, 2]))
    assert taken.max_tokens.tolist() == [64, UNCAPPED]
    assert taken.ignore_eos.tolist() == [True, False]


@pytest.mark.parametrize("name", ["w.parquet", "w.jsonl", "w.csv"])
def test_formats_store_limits(tmp_path, name):
    written = replace(LIMITED, ignore_eos=None) if name == "w.csv" else LIMITED
    write(written, tmp_path / name)
    got = read(tmp_path / name)
    assert got.max_tokens.tolist() == LIMITED.max_tokens.tolist()
    assert got.extra == {}
    if name == "w.csv":
        assert got.ignore_eos is None
    else:
        assert got.ignore_eos.tolist() == LIMITED.ignore_eos.tolist()


def test_sessions_are_written_with_limits(tmp_path):
    sessions = Sessions(turns=2, tools=Tools(2.0, fan_out=3, fan_out_share=0.5))
    w = generate_sessions(200, sessions, ClientLimits(Joint(Fixed(50), Uniform(5, 90)), Fixed(60)), Poisson(1.0))
    write(w, tmp_path / "w.jsonl")
    got = read(tmp_path / "w.jsonl")
    assert (w.max_tokens == 60).all()
    short = replace(sessions, max_context_tokens=100)
    w100 = generate_sessions(200, short, ClientLimits(Joint(Fixed(50), Uniform(5, 90)), Fixed(60)), Poisson(1.0))
    assert (w100.max_tokens == np.minimum(60, 100 - w100.prompt_tokens)).all()
    assert w100.max_tokens.min() < 60
    assert 0 < (w.output_tokens == 60).mean() < 1
    assert got.max_tokens.tolist() == w.max_tokens.tolist()
    assert got.output_tokens.tolist() == w.output_tokens.tolist()
    assert got.after.parent.tolist() == w.after.parent.tolist()


def test_a_users_parquet_file_may_leave_limits_out(tmp_path):
    rows = {"arrival_s": [0.0, 1.0], "prompt_tokens": [3, 4], "output_tokens": [5, 6], "max_tokens": [None, 7]}
    pl.DataFrame(rows).write_parquet(tmp_path / "w.parquet")
    assert read(tmp_path / "w.parquet").max_tokens.tolist() == [UNCAPPED, 7]


ROW = {"timestamp": 0, "input_length": 10, "output_length": 8}


@pytest.mark.parametrize("more", [{}, {"session_id": "s", "delay": 0}])
@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_tokens": 7}, r"line 2: max_tokens must be a whole number from output_length \(8\) up.*it is 7"),
        ({"max_tokens": 8.5}, "line 2: max_tokens must be a whole number"),
        ({"max_tokens": "many"}, "line 2: max_tokens must be a whole number"),
        ({"max_tokens": 9, "ignore_eos": True}, "line 2: with ignore_eos, output_length must equal max_tokens"),
        ({"ignore_eos": True}, "line 2: with ignore_eos"),
        ({"max_tokens": 9, "ignore_eos": "yes"}, "line 2: ignore_eos must be true or false"),
    ],
)
def test_a_contradiction_in_a_trace_is_reported_by_line(tmp_path, limits, message, more):
    first = ROW | {"max_tokens": None, "ignore_eos": False} | more
    with pytest.raises(TraceError, match=message):
        read(put(tmp_path, "t.jsonl", first, ROW | limits | more))


def test_a_vidur_trace_is_checked_too(tmp_path):
    path = tmp_path / "v.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens,max_tokens\n0,5,6,\n1,5,6,4\n")
    with pytest.raises(TraceError, match="line 3: max_tokens must be a whole number from num_decode_tokens"):
        read(path)


def test_a_journal_has_the_limits_of_clients(tmp_path):
    """A limit of 0 is none, and a request of several choices may have several times its limit."""
    head = {"format": "lengthwise-journal", "version": 1, "clock_s": 0.0, "unix_s": 0.0}
    rows = [
        {"arrival_s": i, "finished_s": i + 1, "prompt_tokens": 9, "output_tokens": 30, "priority": 0} | more
        for i, more in enumerate(({"max_tokens": 100}, {"max_tokens": 0}, {"max_tokens": 16}, {}))
    ]
    w = read(put(tmp_path, "j.jsonl", head, *rows))
    assert w.max_tokens.tolist() == [100, UNCAPPED, 32, UNCAPPED]
    assert read(put(tmp_path, "none.jsonl", head, rows[1])).max_tokens is None


def test_spans_have_the_limits_of_clients(tmp_path):
    def span(limit: int | None) -> dict:
        usage = {"gen_ai.usage.input_tokens": 5, "gen_ai.usage.output_tokens": 6}
        attributes = usage | ({} if limit is None else {"gen_ai.request.max_tokens": limit})
        times = {"start_time": "2025-01-01T00:00:00.000000Z", "end_time": "2025-01-01T00:00:01.000000Z"}
        return {"context": {"trace_id": f"t{limit}"}, "attributes": attributes} | times

    assert read(put(tmp_path, "s.jsonl", span(7), span(None))).max_tokens.tolist() == [7, UNCAPPED]
    assert read(put(tmp_path, "n.jsonl", span(None))).max_tokens is None
    with pytest.raises(TraceError, match=r"line 1.*gen_ai.request.max_tokens 5 is below the 6 output tokens"):
        read(put(tmp_path, "b.jsonl", span(5)))


@given(seed=st.integers(0, 2**32), limit=st.integers(1, 900), times=st.floats(1, 9))
def test_limits_end_outputs_and_change_nothing_else(seed, limit, times):
    plain = generate(50, CHAT, Poisson(1.0), seed)
    fixed = generate(50, ClientLimits(CHAT, Fixed(limit)), Poisson(1.0), seed)
    assert fixed.output_tokens.tolist() == np.minimum(plain.output_tokens, limit).tolist()
    assert (fixed.max_tokens == limit).all()
    multiple = generate(50, ClientLimits(CHAT, times), Poisson(1.0), seed)
    assert multiple.output_tokens.tolist() == plain.output_tokens.tolist()
    assert multiple.max_tokens.tolist() == [ceil(output * times) for output in plain.output_tokens.tolist()]
    drawn = generate(50, ClientLimits(CHAT, LogNormal(400, 1)), Poisson(1.0), seed)
    assert drawn.output_tokens.tolist() == np.minimum(plain.output_tokens, drawn.max_tokens).tolist()
    exact = generate(50, ClientLimits(CHAT, LogNormal(400, 1), ignore_eos=True), Poisson(1.0), seed)
    assert exact.max_tokens.tolist() == exact.output_tokens.tolist() == drawn.max_tokens.tolist()
    for one in (fixed, multiple, drawn, exact):
        assert one.prompt_tokens.tolist() == plain.prompt_tokens.tolist()
        assert one.arrival_s.tolist() == plain.arrival_s.tolist()


@pytest.mark.parametrize("cut", ["output", "prompt", "proportional", "redraw"])
def test_a_limit_of_the_total_holds_for_the_clients_limit(cut):
    lengths = ClientLimits(Joint(Uniform(1, 900), Uniform(1, 900)), Fixed(800))
    drawn = draw(Capped(lengths, 1000, cut=cut), 500, np.random.default_rng(1))
    assert (drawn.prompt + drawn.max_tokens <= 1000).all()
    assert (drawn.output <= drawn.max_tokens).all()
    assert (drawn.max_tokens == np.minimum(800, 1000 - drawn.prompt)).all()
    exact = draw(Capped(replace(lengths, ignore_eos=True), 1000, cut=cut), 500, np.random.default_rng(1))
    assert exact.ignore_eos.all()
    assert (exact.output == exact.max_tokens).all()
    assert (exact.prompt + exact.output <= 1000).all()


def test_the_limits_of_a_trace_are_drawn_with_its_lengths():
    drawn = generate(200, Samples.of(LIMITED), Poisson(1.0))
    rows = set(zip(drawn.output_tokens.tolist(), drawn.max_tokens.tolist(), drawn.ignore_eos.tolist(), strict=True))
    assert rows == {(5, 9, False), (64, 64, True), (8, UNCAPPED, False)}
    assert generate(20, ClientLimits(Samples.of(LIMITED), None), Poisson(1.0)).max_tokens is None


def test_the_text_of_an_output_ends_with_it():
    seen = Samples([5], [10], {"output": np.array(["abcdefghij"], object)})
    assert draw(ClientLimits(seen, Fixed(4)), 1, np.random.default_rng(0)).texts["output"][0] == "abcd"


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (lambda: ClientLimits(CHAT, 0.5), "at least 1 times the output; it is 0.5"),
        (lambda: ClientLimits(CHAT, ignore_eos=True).sample(3, np.random.default_rng(0)), "give workload.max_tokens"),
        (
            lambda: ClientLimits(Samples.of(LIMITED), ignore_eos=True).sample(90, np.random.default_rng(0)),
            "a request has none",
        ),
    ],
)
def test_limits_that_cannot_be_are_reported(limits, message):
    with pytest.raises(InputError, match=message):
        limits()
