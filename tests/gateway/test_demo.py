"""The demo: what it asks, what it concludes, and that it runs as a whole."""

from __future__ import annotations

import asyncio
import io
import json
import math
import threading

import numpy as np
import pytest

from lengthwise.gateway.demo import comparison, find_interpreter, run
from lengthwise.gateway.demo.comparison import MAX_TOKENS, Gain, Side, body, burst, change, decision, gain, table
from lengthwise.gateway.demo.engine_side.forced_length import ForcedLength, forced
from lengthwise.gateway.demo.engines import abortable_sleep
from lengthwise.gateway.length_prediction import fixed_tokens
from lengthwise.schema.errors import EngineError, InputError


def test_a_burst_is_the_same_for_the_same_seed_and_number():
    first, again = (burst(3, 1, 20, tokens_per_s=500.0, shrink=8.0) for _ in range(2))
    assert first == again
    assert first != burst(3, 2, 20, tokens_per_s=500.0, shrink=8.0)
    assert all(1 <= one.tokens <= MAX_TOKENS for one in first)
    assert len({one.tokens for one in first}) > 5


def test_the_gateway_does_not_receive_the_output_length():
    question = burst(0, 0, 1, tokens_per_s=500.0, shrink=8.0)[0]
    what = body("tiny", question)
    reported = fixed_tokens(json.dumps(what).encode(), lambda: what, what["max_tokens"])
    assert reported == 0
    assert what["max_tokens"] == MAX_TOKENS
    assert str(question.tokens) not in question.prompt


def test_a_longer_question_gets_a_longer_answer_in_the_mean():
    requested = burst(0, 0, 2000, tokens_per_s=500.0, shrink=1.0)
    short = np.mean([one.tokens for one in requested if one.prompt.startswith("What is")])
    essay = np.mean([one.tokens for one in requested if "essay" in one.prompt])
    assert essay > 20 * short


def _sides(*ratios: float) -> tuple[Side, Side]:
    before = [np.array([1.0, 2.0, 3.0]) * (k + 1) for k in range(len(ratios))]
    after = [jct * ratio for jct, ratio in zip(before, ratios, strict=True)]
    return Side("fcfs", rounds=before), Side("isrtf", rounds=after)


def test_the_gain_is_that_of_the_same_bursts_with_an_interval_over_rounds():
    found = gain(_sides(0.5, 0.5, 0.5))
    assert found.mean == pytest.approx(-0.5)
    assert (found.low, found.high) == (pytest.approx(-0.5), pytest.approx(-0.5))
    assert found.is_significant
    scattered = gain(_sides(0.5, 1.6, 0.7))
    assert scattered.low < scattered.mean < scattered.high
    assert not scattered.is_significant


def test_one_round_has_no_interval_and_none_has_no_gain():
    assert math.isinf(gain(_sides(0.5)).high)
    assert "once both" in change(gain(_sides()))
    assert "95 %" not in change(gain(_sides(0.5)))


def test_the_verdict_is_plain_whatever_comes():
    assert "faster" in decision("x", Gain(-0.3, -0.4, -0.2, 0.1, 4))
    assert "slower" in decision("x", Gain(0.3, 0.2, 0.4, 0.1, 4))
    assert "Not significant" in decision("x", Gain(-0.1, -0.3, 0.2, 0.1, 4))


def test_the_table_shows_both():
    from rich.console import Console

    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table("engines", _sides(0.5, 0.6), 12.0))
    shown = console.export_text()
    assert "first come, first served" in shown
    assert "ISRTF" in shown
    assert "mean JCT" in shown


def test_a_missing_interpreter_is_reported(tmp_path):
    with pytest.raises(InputError, match="must exist"):
        find_interpreter(str(tmp_path / "python"))
    assert find_interpreter("emulated") is None


def test_a_length_is_forced_first_and_after_a_cut():
    reported = {"vllm_xargs": {"output_tokens": 30, "max_tokens": 512}}
    first = json.loads(forced(json.dumps({"max_tokens": 512, **reported}).encode()))
    assert (first["min_tokens"], first["max_tokens"], first["ignore_eos"]) == (30, 30, True)
    later = json.loads(forced(json.dumps({"max_tokens": 512 - 12, **reported}).encode()))
    assert (later["min_tokens"], later["max_tokens"]) == (18, 18)


@pytest.mark.parametrize("raw", [b"no json", b"[]", b'{"max_tokens": 5}', b'{"vllm_xargs": {"output_tokens": 1}}'])
def test_a_body_without_a_length_passes_unchanged(raw):
    assert forced(raw) == raw


def test_the_middleware_rewrites_bodies_and_nothing_else():
    seen: list[tuple[dict, bytes]] = []

    async def app(scope, receive, send):
        got = b""
        if scope["type"] == "http":
            got = (await receive())["body"]
        seen.append((scope, got))

    sent = json.dumps({"max_tokens": 9, "vllm_xargs": {"output_tokens": 4, "max_tokens": 9}}).encode()
    parts = [{"body": sent[:10], "more_body": True}, {"body": sent[10:], "more_body": False}]

    async def receive():
        return {"type": "http.request", **parts.pop(0)}

    async def work():
        layer = ForcedLength(app)
        scope = {"type": "http", "method": "POST", "path": "/v1/completions"}
        await layer({**scope, "headers": [(b"content-length", b"1"), (b"a", b"b")]}, receive, None)
        await layer({"type": "lifespan"}, receive, None)

    asyncio.run(work())
    scope, got = seen[0]
    assert json.loads(got)["max_tokens"] == 4
    assert dict(scope["headers"]) == {b"a": b"b", b"content-length": str(len(got)).encode()}
    assert seen[1][0]["type"] == "lifespan"


@pytest.mark.slow
def test_the_complete_demo_runs_on_emulated_engines(capsys):
    found = run("emulated", port=0, admin_port=0, seconds=0.0, requests=10)
    assert found.rounds == 2
    assert -1 < found.mean < 10
    message = capsys.readouterr().out
    assert "emulated engines" in message
    assert "admin pages  fcfs: http://127.0.0.1:" in message
    assert "2 rounds" in message


def test_engines_whose_startup_is_aborted_are_not_waited_for():
    given_up = threading.Event()
    pause = abortable_sleep(given_up)
    pause(0.0)
    given_up.set()
    with pytest.raises(EngineError, match="aborted"):
        pause(60.0)
    pause(0.0)  # while the engine is stopped


def test_progress_is_printed_while_engines_load(capsys, monkeypatch):
    monkeypatch.setattr(comparison, "PROGRESS_INTERVAL_S", 0.01)
    message = ""
    with comparison.progress("loading"):
        while "loading, 0 s" not in message:
            message += capsys.readouterr().out
    capsys.readouterr()
