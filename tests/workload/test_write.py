from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lengthwise.schema.errors import InputError, OutputError, TraceError, UnknownNameError
from lengthwise.schema.workload import After, Predictions, SharedPrefixes, Workload
from lengthwise.workload import ClosedLoop, preset, read, write

rows = st.lists(st.tuples(st.floats(0, 1e4), st.integers(1, 10**6), st.integers(1, 10**6)), min_size=1, max_size=20)
once = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=12)


def of(requests, **more) -> Workload:
    arrival_s, prompt, output = zip(*sorted(requests), strict=True)
    return Workload(np.array(arrival_s), np.array(prompt), np.array(output), **more)


def assert_same(one: Workload, other: Workload) -> None:
    """Check that both workloads have equal shared prefixes and dependencies."""
    for part, columns in (("prefixes", ("start", "block_ids", "previous_turn")), ("after", ("start", "parent"))):
        a, b = getattr(one, part), getattr(other, part)
        assert (a is None) == (b is None), part
        for column in columns if a is not None else ():
            assert getattr(a, column).tolist() == getattr(b, column).tolist(), column
    if one.prefixes is not None:
        assert one.prefixes.block_tokens == other.prefixes.block_tokens
    if one.after is not None:
        assert one.after.delay_s == pytest.approx(other.after.delay_s, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "form", "tolerance_s"),
    [
        ("w.csv", None, 1e-12),
        ("w.csv.gz", None, 1e-12),
        ("w.jsonl", None, 1e-9),
        ("w.jsonl.gz", None, 1e-9),
        ("w.csv", "azure", 1.01e-7),
        ("w.txt", "mooncake", 1e-9),
    ],
)
@once
@given(requests=rows)
def test_what_is_written_is_read_from_its_first_arrival_on(tmp_path, requests, name, form, tolerance_s):
    before = of(requests)
    write(before, tmp_path / name, form)
    after = read(tmp_path / name)
    np.testing.assert_allclose(after.arrival_s, before.arrival_s - before.arrival_s[0], atol=tolerance_s)
    assert after.prompt_tokens.tolist() == before.prompt_tokens.tolist()
    assert after.output_tokens.tolist() == before.output_tokens.tolist()
    assert after.name == "w"


@once
@given(requests=rows, seed=st.integers(0, 9))
def test_parquet_keeps_everything(tmp_path, requests, seed):
    n, rng = len(requests), np.random.default_rng(seed)
    blocks = np.empty(n, object)
    blocks[:] = [rng.integers(0, 99, rng.integers(0, 4)) for _ in range(n)] if n > 1 else None
    if n == 1:
        blocks[0] = np.array([3, 4])
    before = of(
        requests,
        predicted_tokens=rng.random(n) * 100,
        priority=rng.integers(-5, 5, n),
        extra={"session": rng.integers(0, 9, n), "class": np.array([f"c{i}" for i in range(n)]), "block_ids": blocks},
        concurrency=None if seed % 2 or any(row[0] for row in requests) else 7,
        name="ein Name; 名前",
    )
    write(before, tmp_path / "w.parquet")
    after = read(tmp_path / "w.parquet")
    for column in ("arrival_s", "prompt_tokens", "output_tokens", "predicted_tokens", "priority"):
        assert getattr(after, column).tobytes() == getattr(before, column).tobytes()
    assert (after.name, after.concurrency) == (before.name, before.concurrency)
    assert after.extra["session"].tolist() == before.extra["session"].tolist()
    assert after.extra["class"].tolist() == before.extra["class"].tolist()
    assert [ids.tolist() for ids in after.extra["block_ids"]] == [ids.tolist() for ids in blocks]


def test_parquet_can_be_cut_and_scaled(tmp_path):
    before = preset("chat-1m").generate(50, ClosedLoop(3), predicted="oracle")
    write(before, tmp_path / "w.parquet")
    after = read(tmp_path / "w.parquet", max_requests=10, time_scale=2)
    assert (len(after), after.concurrency, after.name) == (10, 3, "chat-1m")
    assert after.predicted_tokens.tolist() == before.predicted_tokens[:10].tolist()


def test_mooncake_keeps_blocks_and_sessions_and_integer_milliseconds(tmp_path):
    prefixes = SharedPrefixes(512, np.array([0, 2, 2]), np.array([1, 2]))
    before = of([(0.0, 600, 5), (3.0, 7, 8)], prefixes=prefixes, extra={"session": np.array([4, 5])})
    write(before, tmp_path / "w.jsonl")
    first = (tmp_path / "w.jsonl").read_text().splitlines()[0]
    assert first == '{"timestamp":0,"input_length":600,"output_length":5,"hash_ids":[1,2],"session_id":4}'
    after = read(tmp_path / "w.jsonl")
    assert_same(after, before)
    assert after.extra["session"].tolist() == [4, 5]


def session(turn: bool = True) -> Workload:
    """Return two turns of one session, a request between them, and two children of the second turn."""
    return Workload(
        arrival_s=np.array([0.0, 0.5, 0.5, 0.5, 1.25]),
        prompt_tokens=np.array([600, 700, 900, 950, 40]),
        output_tokens=np.array([50, 60, 70, 80, 90]),
        extra={"session": np.array([3, 1, 1, 1, 9])},
        after=After(np.array([0, 0, 0, 1, 3, 3]), np.array([1, 1, 2]), np.array([0.0, 0.0, 2.5, 1 / 3, 0.0])),
        prefixes=SharedPrefixes(
            64, np.array([0, 2, 4, 4, 4, 4]), np.array([5, 6, 5, 7]), np.array([-1, -1, 1 if turn else -1, -1, -1])
        ),
    )


@pytest.mark.parametrize("turn", [True, False])
@pytest.mark.parametrize("name", ["w.parquet", "w.parquet.gz", "w.jsonl", "w.jsonl.gz"])
def test_prefixes_and_dependencies_are_read_back(tmp_path, name, turn):
    before = session(turn)
    write(before, tmp_path / name)
    after = read(tmp_path / name)
    assert_same(after, before)
    assert after.extra["session"].tolist() == before.extra["session"].tolist()
    assert_same(read(tmp_path / name, max_requests=3), before.take(np.arange(3)))


def test_other_formats_refuse_dependencies(tmp_path):
    with pytest.raises(InputError, match="the format vidur does not support requests that depend on others"):
        write(session(), tmp_path / "w.csv")
    late = replace(session(), arrival_s=np.array([0.0, 0.5, 0.6, 0.6, 1.25]))
    with pytest.raises(OutputError, match=r"give request 2 the arrival of its latest parent"):
        write(late, tmp_path / "w.jsonl")


def test_the_same_workload_gives_the_same_bytes(tmp_path):
    for name in ("a.csv.gz", "b.csv.gz"):
        write(preset("chat-1m").generate(20), tmp_path / name)
    assert (tmp_path / "a.csv.gz").read_bytes() == (tmp_path / "b.csv.gz").read_bytes()
    assert gzip.decompress((tmp_path / "a.csv.gz").read_bytes()).startswith(b"arrived_at,num_prefill_tokens,")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("name", "form", "error", "message"),
    [
        ("w.txt", None, OutputError, r"must end in \.parquet, \.csv, \.jsonl"),
        ("w.csv", "burstgpt", UnknownNameError, "no format to write named 'burstgpt'"),
        ("no/w.csv", None, OutputError, "does not exist"),
        ("", "vidur", OutputError, "it is a folder"),
    ],
)
def test_unwritable_workloads_are_reported(tmp_path, name, form, error, message):
    with pytest.raises(error, match=message):
        write(of([(0.0, 1, 1)]), tmp_path / name, form)
    assert names(tmp_path) == []


def test_a_closed_loop_needs_parquet(tmp_path):
    with pytest.raises(OutputError, match=r"cannot hold a closed loop; write a \.parquet file"):
        write(of([(0.0, 1, 1)], concurrency=2), tmp_path / "w.csv")


def test_a_column_that_cannot_be_stored_leaves_no_file(tmp_path):
    mixed = np.array([1, "x"], object)
    with pytest.raises(OutputError, match="the column class cannot be stored"):
        write(of([(0.0, 1, 1), (0.0, 1, 1)], extra={"class": mixed}), tmp_path / "w.parquet")
    assert names(tmp_path) == []


def test_parquet_of_others_needs_the_three_columns_and_good_values(tmp_path):
    path = tmp_path / "w.parquet"
    good = {"arrival_s": [0.0, 1.0], "prompt_tokens": [5, 6], "output_tokens": [7, 8]}
    pl.DataFrame(good).write_parquet(path)
    assert (len(read(path)), read(path).name) == (2, "w")
    cases = [
        ({"arrival_s": [0.0, 1.0]}, "lacks the columns prompt_tokens, output_tokens; it has arrival_s"),
        ({**good, "prompt_tokens": [5, None]}, "prompt_tokens must hold a number in every row"),
        ({**good, "prompt_tokens": [5.5, 6.0]}, "prompt_tokens must hold whole numbers"),
        ({**good, "output_tokens": [7, -8]}, "output_tokens must be at least 1; request 1 has -8"),
        ({**good, "arrival_s": [1.0, 0.0]}, "arrival_s must not decrease"),
        ({**good, "arrival_s": [0.0, float("nan")]}, "arrival_s must be finite"),
        ({name: values[:0] for name, values in good.items()}, "holds no request"),
    ]
    for columns, message in cases:
        pl.DataFrame(columns).write_parquet(path)
        with pytest.raises(TraceError, match=rf"w\.parquet: {message}"):
            read(path)


def test_a_truncated_parquet_file_is_reported(tmp_path):
    path = tmp_path / "w.parquet"
    write(preset("chat-1m").generate(2000), path)
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(TraceError, match="cut off or damaged"):
        read(path)


@pytest.mark.parametrize("name", ["w.csv", "w.jsonl", "w.parquet"])
def test_tenants_are_retained(tmp_path, name):
    write(of([(0.0, 1, 1), (1.0, 1, 1), (2.0, 1, 1)], tenant=[2, 0, 2]), tmp_path / name)
    assert read(tmp_path / name).tenant.tolist() == [2, 0, 2]
    assert read(tmp_path / name, max_requests=2).tenant.tolist() == [2, 0]


def test_named_tenants_are_numbered_and_a_missing_one_is_a_tenant_too(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens,tenant\n0,1,1,ann\n1,2,2,bob\n2,3,3,\n3,1,1,ann\n")
    assert read(path).tenant.tolist() == [0, 1, 2, 0]


def test_parquet_keeps_repredictions(tmp_path):
    made = Predictions(5, np.array([0, 2, 3]), np.array([7.0, 9.5, 1.0]), np.array([4.0, 3.0, 1.5]))
    write(of([(0.0, 1, 9), (1.0, 1, 1)], predictions=made), tmp_path / "w.parquet")
    after = read(tmp_path / "w.parquet")
    assert after.predictions.window_tokens == 5
    for column in ("start", "total_tokens", "gittins_rank"):
        np.testing.assert_array_equal(getattr(after.predictions, column), getattr(made, column))
    assert after.predicted_tokens.tolist() == [7.0, 1.0]
    assert len(read(tmp_path / "w.parquet", max_requests=1).predictions) == 1
