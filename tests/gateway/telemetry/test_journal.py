"""The journal: what was written is read back, whole lines survive whatever ends the process."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from traced_requests import request, serve

from lengthwise.gateway.request import Client, Outcome, PrefixHasher
from lengthwise.gateway.telemetry import Journal, RequestTimelines, Row, read
from lengthwise.gateway.telemetry import journal as journal_module
from lengthwise.gateway.telemetry.journal import as_dict
from lengthwise.schema.errors import InputError, OutputError


def rows(n: int) -> list[Row]:
    reported: list[Row] = []
    traces = RequestTimelines()
    traces.subscribe(reported.append)
    for number in range(n):
        serve(traces, request(number, float(number)), number + 0.25, 4, 0.1)
    return reported


def write(path, some: list[Row], **options) -> Journal:
    async def go() -> Journal:
        async with Journal(path, lambda: 100.0, epoch=lambda: 1_000_100.0, **options) as journal:
            for row in some:
                journal.append(row)
                await journal.flush() if options else None
            return journal

    return asyncio.run(go())


def test_rows_come_back_with_times_of_the_day(tmp_path) -> None:
    path = tmp_path / "j.jsonl"
    assert write(path, rows(3)).written == 3
    write(path, rows(2))
    back = list(read(path))
    assert [run for run, _ in back] == [1, 1, 1, 2, 2]
    first, reported = back[0][1], rows(1)[0]
    assert first.arrival_s == 1_000_000.0
    assert first.jct_s == pytest.approx(reported.jct_s)
    assert (first.model, first.output_tokens, first.source) == ("m", 4, "predictor")
    assert first.predicted_tokens == reported.predicted_tokens
    assert 0 <= first.predicted_level <= 1
    assert b"prompt_tokens" in path.read_bytes()


def test_a_limit_that_the_client_does_not_set_is_0() -> None:
    reported: list[Row] = []
    traces = RequestTimelines(max_tokens=101)
    traces.subscribe(reported.append)
    for number, limit in enumerate((101, 100)):
        traces.max_tokens = limit
        serve(traces, request(number), 0.25, 4, 0.1)
    assert [row.max_tokens for row in reported] == [100, 0]


def test_a_response_in_one_piece_has_no_first_token(tmp_path) -> None:
    """Only its end shows that its tokens come at all: that is when they are reported."""
    q, path = request(1), tmp_path / "j.jsonl"
    q.dispatch.single_chunk, q.generated_tokens = True, 9
    reported: list[Row] = []
    traces = RequestTimelines()
    traces.subscribe(reported.append)
    traces.on_admission(q)
    traces.dispatched(q, "w0", 1.0)
    traces.tokens(q, 9, 4.0)
    traces.on_end(q, Outcome.FINISHED, 4.0)
    write(path, reported)
    ((_, back),) = read(path)
    assert math.isnan(back.first_token_s)
    assert (back.output_tokens, back.jct_s) == (9, pytest.approx(4.0))


SYSTEM = "You are a clerk of the archive. " * 40


def recorded(session: str, *, prefixes: bool = True, salt: bytes = b"salt") -> Row:
    """A request of a session, with a prompt of text and a part that the engine had cached."""
    q = replace(request(1), prompt_tokens=300, client=Client(0, session=session))
    q.prefix = PrefixHasher(salt).of_text(SYSTEM, 300, model="m")
    q.dispatch.reported_cached_tokens, q.dispatch.kv_tokens = 128.0, 30_000
    reported: list[Row] = []
    traces = RequestTimelines(prefixes=prefixes)
    traces.subscribe(reported.append)
    serve(traces, q, 1.0, 4, 0.1)
    return reported[0]


def test_beginnings_and_sessions_are_recorded_as_hashes(tmp_path) -> None:
    path = tmp_path / "j.jsonl"
    write(path, [recorded("talk of alice"), recorded(""), recorded("talk of alice", salt=b"other")])
    first, alone, other = (row for _, row in read(path))
    assert first.prefix == recorded("x").prefix
    assert [tokens for tokens, _ in first.prefix] == [60, 120, 180, 240, 300]
    assert first.prefix == alone.prefix
    assert not {key for _, key in first.prefix} & {key for _, key in other.prefix}
    assert first.session > 0 == alone.session
    assert first.session != other.session, "each run has its own salt"
    assert (first.cached_tokens, first.kv_tokens) == (128.0, 30_000)
    text = path.read_text()
    assert not any(word in text for word in ("archive", "alice", "clerk"))
    assert recorded("x", prefixes=False).prefix == ()


def test_a_journal_from_before_the_prefixes_is_read(tmp_path) -> None:
    path = tmp_path / "j.jsonl"
    write(path, [recorded("talk")])
    new = {"session", "prefix", "cached_tokens", "kv_tokens"}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({k: v for k, v in one.items() if k not in new}) + "\n" for one in lines))
    ((_, row),) = read(path)
    assert (row.session, row.prefix, row.kv_tokens) == (0, (), 0)
    assert math.isnan(row.cached_tokens)


def test_a_torn_line_is_left_out_and_does_not_spoil_the_next(tmp_path) -> None:
    path = tmp_path / "j.jsonl"
    write(path, rows(3))
    path.write_bytes(path.read_bytes()[:-20])
    write(path, rows(1))
    assert [(run, row.id) for run, row in read(path)] == [(1, 0), (1, 1), (2, 0)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("output_tokens", 1e308), ("output_tokens", "4"), ("arrival_s", None), ("worker", []), ("model", {}),
        ("repredictions", 7), ("repredictions", [[1]]), ("queued_for_s", "long"), ("failovers", None),
        ("prefix", 7), ("prefix", [["a", 1]]), ("session", 1e300),
    ],
)  # fmt: skip
def test_a_line_that_is_no_row_is_left_out(tmp_path, name, value) -> None:
    path = tmp_path / "j.jsonl"
    write(path, rows(3))
    head, first, *others = path.read_text().splitlines()
    path.write_text("\n".join([head, json.dumps(json.loads(first) | {name: value}), *others, ""]))
    assert [row.id for _, row in read(path)] == [1, 2]


@pytest.mark.parametrize("broken", [{"unix_s": None}, {"unix_s": "noon"}, {"clock_s": []}])
def test_a_run_whose_first_line_has_no_time_is_left_out(tmp_path, broken) -> None:
    path = tmp_path / "j.jsonl"
    write(path, rows(2))
    head, *others = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps(json.loads(head) | broken), *others, ""]))
    write(path, rows(1))
    assert [(run, row.id) for run, row in read(path)] == [(2, 0)]


def test_files_go_round_by_size(tmp_path) -> None:
    path = tmp_path / "j.jsonl"
    write(path, rows(40), max_bytes=2000, num_old=2)
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["j.jsonl", "j.jsonl.1", "j.jsonl.2"]
    assert max(file.stat().st_size for file in tmp_path.iterdir()) < 3500
    newest = [row.id for name in reversed(names) for _, row in read(tmp_path / name)]
    assert newest == list(range(newest[0], 40))


def test_what_was_flushed_survives_a_kill(tmp_path) -> None:
    path = tmp_path / "j.jsonl"
    script = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_journal import rows
from lengthwise.gateway.telemetry import Journal
async def go():
    async with Journal({str(path)!r}, flush_s=0.05) as journal:
        some = rows(500)
        for n in range(10**9):
            journal.append(some[n % 500])
            await asyncio.sleep(0.0005)
asyncio.run(go())
"""
    child = subprocess.Popen([sys.executable, "-c", script])
    try:
        end = time.monotonic() + 30
        while not (path.exists() and path.stat().st_size > 20_000):
            assert time.monotonic() < end
            assert child.poll() is None
            time.sleep(0.02)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    complete = path.read_bytes().count(b"\n") - 1
    assert complete > 20
    assert sum(1 for _ in read(path)) == complete


def test_a_file_that_is_no_journal_is_reported(tmp_path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"a": 1}\n')
    for path in (other, tmp_path / "absent.jsonl"):
        with pytest.raises(InputError, match="journal"):
            list(read(path))
    with pytest.raises(OutputError, match="journal"):
        write(tmp_path / "no" / "such" / "j.jsonl", [])


def fill_disk(monkeypatch) -> None:
    def write(file: int, data) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", write)


def test_a_disk_that_takes_nothing_holds_nothing_up(tmp_path, caplog, monkeypatch) -> None:
    async def go() -> Journal:
        async with Journal(tmp_path / "j", flush_s=60) as journal:
            fill_disk(monkeypatch)
            for row in rows(5):
                journal.append(row)
                await journal.flush()
            return journal

    journal = asyncio.run(go())
    assert journal.written == 0
    assert caplog.text.count("cannot be written") == 1, "once, however often it is tried"
    assert caplog.text.count("5 rows of the journal") == 1, "at the end"


def test_rows_that_a_full_disk_refuses_are_serialized_once(tmp_path, monkeypatch) -> None:
    serialized = []
    monkeypatch.setattr(journal_module, "as_dict", lambda row: serialized.append(row.id) or as_dict(row))

    async def go() -> None:
        async with Journal(tmp_path / "j", flush_s=60) as journal:
            fill_disk(monkeypatch)
            for row in rows(5):
                journal.append(row)
                await journal.flush()

    asyncio.run(go())
    assert serialized == [row.id for row in rows(5)]


def test_rows_half_written_on_a_full_disk_appear_once_after_a_retry(tmp_path, monkeypatch) -> None:
    path, complete, broken = tmp_path / "j", os.write, []

    def half(file: int, data) -> int:
        if len(broken) == 1:
            broken.append(True)
            raise OSError(errno.ENOSPC, "No space left on device")
        if broken or len(data) < 500:
            return complete(file, data)
        broken.append(True)
        return complete(file, data[: len(data) // 2])

    async def go() -> Journal:
        async with Journal(path, flush_s=60) as journal:
            monkeypatch.setattr(os, "write", half)
            for row in rows(6):
                journal.append(row)
            await journal.flush()
            assert (journal.written, len(broken)) == (0, 2)
        return journal

    assert asyncio.run(go()).written == 6
    assert [row.id for _, row in read(path)] == [row.id for row in rows(6)]


def test_rows_go_nowhere_else_while_old_files_cannot_be_moved(tmp_path, monkeypatch) -> None:
    """The journal's descriptor is free meanwhile, and who opens a file or a socket next has its number."""
    path, other = tmp_path / "j", tmp_path / "other"

    def refused(_: Path, __: Path) -> None:
        raise PermissionError("no")

    async def go() -> Journal:
        async with Journal(path, flush_s=60, max_bytes=10) as journal:
            for row in rows(2):
                journal.append(row)
            monkeypatch.setattr(Path, "replace", refused)
            await journal.flush()
            assert journal.written == 0
            with other.open("wb"):
                await journal.flush()
        return journal

    assert asyncio.run(go()).written == 2
    assert other.read_bytes() == b""
    assert [row.id for _, row in read(path)] == [0, 1]
