"""Records come back from a file as they went in, to the bit, and a bad file is reported."""

from __future__ import annotations

import dataclasses

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lengthwise import deploy, simulate
from lengthwise import workload as w
from lengthwise.measure import read_records, write_records
from lengthwise.schema.errors import InputError, OutputError
from lengthwise.schema.records import (
    BENCH,
    SIMULATED,
    Records,
    ReplicaTotals,
    RequestRecords,
    RunResult,
    StepRecords,
    TimeSeries,
    TokenGaps,
    TokenTimes,
)
from lengthwise.schema.workload import Predictions, Workload

FLOATS = st.floats(width=64, allow_nan=True)
TIMES = st.floats(0, 1e9)
COMPLETE = st.integers(0, 2**62)


def column(draw, n, elements, dtype=np.float64):
    return draw(hnp.arrays(dtype, n, elements=elements))


def floats_and_ints(draw, made, n, floats=FLOATS):
    hints = {f.name: str(f.type) for f in dataclasses.fields(made)}
    return made(
        **{
            k: column(draw, n, floats) if "Floats" in v else column(draw, n, COMPLETE, np.int64)
            for k, v in hints.items()
        }
    )


def parted(draw, n, smallest):
    lengths = draw(hnp.arrays(np.int64, n, elements=st.integers(smallest, 3)))
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


@st.composite
def workloads(draw, n):
    start = parted(draw, n, 1)
    rows = int(start[-1])
    blocks = np.empty(n, object)
    for i in range(n):
        blocks[i] = column(draw, draw(st.integers(0, 3)), COMPLETE, np.int64)
    extra = {
        "prompt": np.array([draw(st.text(max_size=4)) for _ in range(n)], object),
        "session": column(draw, n, COMPLETE, np.int64),
        "class": np.array([draw(st.sampled_from(["a", "bcd"])) for _ in range(n)]),
        "block_ids": blocks,
    }
    retained = draw(st.sets(st.sampled_from(sorted(extra))))
    closed = draw(st.none() | st.integers(1, 5))
    arrival_s = np.sort(column(draw, n, TIMES)) if closed is None else np.zeros(n)
    counts = st.integers(1, 10**11)
    predicted = Predictions(16, start, column(draw, rows, TIMES), column(draw, rows, TIMES))
    return Workload(
        arrival_s,
        column(draw, n, counts, np.int64),
        column(draw, n, counts, np.int64),
        predictions=draw(st.sampled_from([None, predicted])),
        priority=draw(st.sampled_from([None, column(draw, n, st.integers(-5, 5), np.int64)])),
        tenant=draw(st.sampled_from([None, column(draw, n, st.integers(0, 9), np.int64)])),
        extra={k: extra[k] for k in retained},
        concurrency=closed,
        name=draw(st.text(max_size=5)),
    )


@st.composite
def runs(draw):
    n = draw(st.integers(1, 6))
    requests = RequestRecords(
        column(draw, n, FLOATS),
        *(column(draw, n, COMPLETE, np.int64) for _ in range(2)),
        column(draw, n, st.integers(0, 3), np.int8),
        column(draw, n, st.integers(-1, 9), np.int32),
        *(column(draw, n, FLOATS) for _ in range(3)),
        column(draw, n, st.integers(0, 9), np.int32),
        column(draw, n, FLOATS),
        column(draw, n, st.integers(0, 3), np.int8),
    )
    bins, few = draw(st.integers(1, 9)), draw(st.booleans())
    gaps = TokenGaps(
        column(draw, bins, COMPLETE, np.int64),
        column(draw, bins + 1, FLOATS),
        draw(COMPLETE),
        draw(FLOATS),
        draw(FLOATS),
        column(draw, 4, FLOATS) if few else None,
        column(draw, 4, COMPLETE, np.int64) if few else None,
    )
    series = TimeSeries(draw(FLOATS), *(column(draw, bins, FLOATS) for _ in range(6)))
    steps = floats_and_ints(draw, StepRecords, bins) if few else None
    totals = floats_and_ints(draw, ReplicaTotals, draw(st.integers(1, 3)))
    name = draw(st.text(max_size=5))
    records = Records(requests, steps, gaps, totals, series, draw(FLOATS), draw(COMPLETE), name)
    start = parted(draw, n, 0)
    pieces = TokenTimes(start, column(draw, int(start[-1]), FLOATS), column(draw, int(start[-1]), COMPLETE, np.int64))
    return RunResult(
        records,
        draw(workloads(n)),
        draw(st.sampled_from([SIMULATED, BENCH, "guidellm"])),
        {"url": draw(st.text(max_size=5)), "nested": {"list": [1, 2.5, None]}},
        tuple(draw(st.lists(st.text(max_size=5), max_size=2))),
        {"refused": draw(COMPLETE)},
        draw(st.sampled_from([None, pieces])),
    )


def same(a, b, where=""):
    """Asserts equality to the bit, dtypes included."""
    assert type(a) is type(b) or not dataclasses.is_dataclass(a), where
    if dataclasses.is_dataclass(a):
        for f in dataclasses.fields(a):
            same(getattr(a, f.name), getattr(b, f.name), f"{where}.{f.name}")
    elif isinstance(a, np.ndarray) and a.dtype != object:
        assert (a.dtype, a.shape) == (b.dtype, b.shape), where
        assert np.array_equal(a, b, equal_nan=a.dtype.kind == "f"), where
        if a.dtype.kind == "f":
            assert np.array_equal(np.signbit(a), np.signbit(b)) or np.isnan(a).any(), where
    elif isinstance(a, np.ndarray):
        assert len(a) == len(b), where
        for one, other in zip(a, b, strict=True):
            same(one, other, where)
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key, value in a.items():
            same(value, b[key], f"{where}[{key}]")
    else:
        assert repr(a) == repr(b), where


@pytest.mark.slow
@settings(max_examples=60)
@given(runs())
def test_what_is_read_is_what_was_written_to_the_bit(tmp_path_factory, run):
    path = tmp_path_factory.mktemp("records") / "run.parquet"
    write_records(run, path)
    same(read_records(path), run)


@pytest.fixture
def run():
    return _run()


def _run() -> RunResult:
    n = 3
    zeros, complete = np.zeros(n), np.ones(n, np.int64)
    requests = RequestRecords(
        zeros, complete, complete, np.zeros(n, np.int8), np.zeros(n, np.int32), zeros, zeros, zeros + 1,
        np.zeros(n, np.int32), zeros, np.zeros(n, np.int8),
    )  # fmt: skip
    one = np.zeros(1)
    gaps = TokenGaps(np.zeros(1, np.int64), np.array([0.0, 1.0]), 0, 0.0, 0.0, None, None)
    counts = np.zeros(1, np.int64)
    totals = ReplicaTotals(counts, counts, one, counts, *([one] * 11))
    records = Records(requests, None, gaps, totals, TimeSeries(1.0, *([one] * 6)), 1.0, 0, "x")
    return RunResult(records, Workload(zeros, complete, complete), BENCH)


def test_a_missing_file_is_reported(tmp_path):
    with pytest.raises(InputError, match="there is no file of records"):
        read_records(tmp_path / "none.parquet")


def test_a_file_truncated_anywhere_is_reported(tmp_path, run):
    path = tmp_path / "run.parquet"
    write_records(run, path)
    complete = path.read_bytes()
    for stop in range(0, len(complete), 97):
        path.write_bytes(complete[:stop])
        with pytest.raises(InputError, match=r"run.parquet must"):
            read_records(path)


def test_a_workload_is_not_taken_for_records(tmp_path, run):
    w.write(run.workload, tmp_path / "w.parquet")
    with pytest.raises(InputError, match=r"must be a file of records.*lengthwise.workload"):
        read_records(tmp_path / "w.parquet")


def test_a_newer_version_is_reported(tmp_path, run):
    path = tmp_path / "run.parquet"
    write_records(run, path)
    text = pl.read_parquet_metadata(path)["lengthwise.records"].replace('"version": 1', '"version": 2')
    pl.read_parquet(path).write_parquet(path, metadata={"lengthwise.records": text})
    with pytest.raises(InputError, match="must be of version 1; it is of 2"):
        read_records(path)


def test_a_missing_column_is_reported(tmp_path, run):
    path = tmp_path / "run.parquet"
    write_records(run, path)
    text = pl.read_parquet_metadata(path)["lengthwise.records"]
    pl.read_parquet(path).drop("finished_s").write_parquet(path, metadata={"lengthwise.records": text})
    with pytest.raises(InputError, match=r"missing or damaged.*finished_s"):
        read_records(path)


def test_live_objects_among_the_facts_leave_no_file(tmp_path, run):
    with pytest.raises(OutputError, match="metadata of records"):
        write_records(dataclasses.replace(run, metadata={"x": object()}), tmp_path / "run.parquet")
    assert not list(tmp_path.iterdir())


def test_other_readers_see_a_row_a_request(tmp_path, run):
    write_records(run, tmp_path / "run.parquet")
    frame = pl.read_parquet(tmp_path / "run.parquet")
    assert frame["finished_s"].to_list() == [1.0, 1.0, 1.0]
    assert frame["workload.prompt_tokens"].to_list() == [1, 1, 1]


def test_lists_that_are_all_empty_keep_their_kind(tmp_path):
    blocks = np.empty(2, object)
    blocks[:] = [np.zeros(0, np.int64), np.zeros(0, np.int64)]
    requested = Workload(np.zeros(2), np.ones(2, int), np.ones(2, int), extra={"block_ids": blocks})
    ran = simulate(requested, deploy("opt-125m", "A100-80GB"))
    write_records(RunResult(ran, requested, "simulate"), tmp_path / "run.parquet")
    again = read_records(tmp_path / "run.parquet").workload.extra["block_ids"]
    assert [one.dtype for one in again] == [np.dtype(np.int64)] * 2
