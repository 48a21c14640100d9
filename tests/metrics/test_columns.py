from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest

from lengthwise.metrics import frame, request_columns
from lengthwise.schema.errors import InputError, MissingExtraError, UnknownNameError
from lengthwise.schema.records import Status


@pytest.fixture(scope="module")
def records(toy):
    return toy.records(200)


def test_columns_follow_their_definitions_request_by_request(records) -> None:
    columns, r = request_columns(records), records.requests
    for i in range(len(r.arrival_s)):
        assert columns["queueing_delay_s"][i] == pytest.approx(r.scheduled_s[i] - r.arrival_s[i], nan_ok=True)
        assert columns["ttft_s"][i] == pytest.approx(r.first_token_s[i] - r.arrival_s[i], nan_ok=True)
        if r.status[i] == Status.FINISHED:
            jct = r.finished_s[i] - r.arrival_s[i]
            assert columns["jct_s"][i] == pytest.approx(jct)
            assert columns["normalized_latency_s"][i] == pytest.approx(jct / r.output_tokens[i])
        else:
            assert np.isnan(columns["jct_s"][i])


def test_one_token_has_no_tpot_and_no_token_no_normalized_latency(records) -> None:
    columns, r = request_columns(records), records.requests
    finished = r.status == Status.FINISHED
    assert np.isnan(columns["tpot_s"][r.output_tokens <= 1]).all()
    assert (r.output_tokens == 1).any()
    assert (columns["tpot_s"][finished & (r.output_tokens > 1)] > 0).all()
    assert np.isnan(columns["normalized_latency_s"][r.output_tokens == 0]).all()


def test_recorded_columns_are_not_copied(records) -> None:
    columns = request_columns(records)
    for name in ("arrival_s", "prompt_tokens", "output_tokens", "status", "replica", "preemptions", "queued_for_s"):
        assert columns[name] is getattr(records.requests, name)


def shares(kind: str, made, name: str, column) -> bool:
    if kind == "arrow":
        return made[name].chunk(0).buffers()[1].address == column.ctypes.data
    if kind == "pandas":
        return np.shares_memory(made[name].to_numpy(), column)
    return np.shares_memory(made[name].to_numpy(allow_copy=False), column)


@pytest.mark.parametrize("kind", ["polars", "pandas", "arrow"])
def test_frames_hold_the_same_values_in_the_same_memory(records, kind) -> None:
    pytest.importorskip({"arrow": "pyarrow"}.get(kind, kind))
    made = frame(records, kind)
    for name, column in request_columns(records).items():
        assert np.array_equal(np.asarray(made[name]), column, equal_nan=column.dtype.kind == "f")
    for name in ("arrival_s", "prompt_tokens", "output_tokens", "status", "replica", "preemptions", "queued_for_s"):
        assert shares(kind, made, name, getattr(records.requests, name)), name


def test_a_frame_of_steps(records) -> None:
    made = frame(records, table="steps")
    assert made.columns == [f.name for f in dataclasses.fields(records.steps)]
    assert made["prefill_tokens"].sum() == records.steps.prefill_tokens.sum()
    with pytest.raises(InputError, match="recorded steps"):
        frame(dataclasses.replace(records, steps=None), table="steps")


def test_invalid_frames_are_reported(records, monkeypatch) -> None:
    with pytest.raises(UnknownNameError, match="polars"):
        frame(records, "polar")
    with pytest.raises(UnknownNameError, match="requests"):
        frame(records, table="request")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match=r"lengthwise\[pandas\]"):
        frame(records, "pandas")
