"""``lengthwise serve --demo`` on two real vLLMs: a short one, and one that is interrupted."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]

REQUESTS = 10
BEFORE_S = 60.0
"""Until both engines have been started: long, for a machine that does other things."""


def demo_words(python: str) -> list[str]:
    """What a user types behind ``lengthwise``; at free ports."""
    return ["serve", "--demo", "--engine-python", python, "--port", "0", "--admin-port", "0"]


def living(groups: set[int]) -> list[int]:
    """Processes of these groups: an engine leads one, and all that it starts is in it."""
    return [pid for pid, (_, group) in processes().items() if group in groups]


def processes() -> dict[int, tuple[int, int]]:
    """(parent, group) of every process that lives."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent, group, *_ = stat.read_text().rsplit(")", 1)[1].split()
            if state not in "ZX":
                found[int(stat.parent.name)] = int(parent), int(group)
    return found


def received(stream: bytes) -> tuple[str, int]:
    """(text, output tokens) of an answer that was streamed."""
    lines = (line.removeprefix("data: ") for line in stream.decode().splitlines() if line)
    parts = [json.loads(line) for line in lines if line != "[DONE]"]
    text = "".join(choice["text"] for part in parts for choice in part["choices"])
    (usage,) = (part["usage"] for part in parts if part.get("usage") and not part["choices"])
    return text, usage["completion_tokens"]


@pytest.fixture
def short(monkeypatch, tmp_path):
    """Makes the demo short, and keeps what it does not return: its engines, its sides, what clients read by port."""
    import aiohttp

    from lengthwise.backend import process
    from lengthwise.gateway import demo

    engines, sides, answers = [], [], defaultdict(list)
    started, raced, read = process.local_engine, demo.race, aiohttp.ClientResponse.read

    @contextlib.contextmanager
    def keep_engine(*given, **named):
        with started(*given, **named) as engine:
            engines.append(engine)
            assert living({engine.process.pid})
            yield engine

    async def keep_sides(*given, **named):
        sides.extend(await raced(*given, **named))
        return sides

    async def keep_answer(answer):
        reported = await read(answer)
        if answer.url.path == "/v1/completions":
            answers[answer.url.port].append(reported)
        return reported

    monkeypatch.setattr(process, "local_engine", keep_engine)
    monkeypatch.setattr(demo, "race", keep_sides)
    monkeypatch.setattr(aiohttp.ClientResponse, "read", keep_answer)
    for name, value in {"seconds": 0.0, "requests": REQUESTS}.items():
        monkeypatch.setitem(demo.run.__kwdefaults__, name, value)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return engines, sides, answers


def test_both_orders_serve_the_same_requests_on_real_engines_that_are_gone_afterwards(
    short, engine_python, tmp_path, capsys
):
    from lengthwise.cli import main
    from lengthwise.gateway.demo.comparison import WARM_UP_ROUND, burst

    engines, sides, answers = short
    assert main(demo_words(engine_python)) == 0
    message = capsys.readouterr().out
    assert f"Two vLLMs on this CPU, by {engine_python}" in message
    assert "emulated" not in message
    assert "2 rounds; 2 vLLMs on this CPU (random weights, one thread each)" in " ".join(message.split())

    assert [engine.process.args[:2] for engine in engines] == [[engine_python, "-m"]] * 2
    assert all("vllm.entrypoints" in engine.process.args[2] for engine in engines)
    assert living({engine.process.pid for engine in engines}) == []
    assert list(tmp_path.iterdir()) == []

    assert [side.mode for side in sides] == ["fcfs", "isrtf"]
    assert [[len(jct) for jct in side.rounds] for side in sides] == [[REQUESTS] * 2] * 2
    first, own = (sorted(map(received, answers[side.port])) for side in sides)
    assert first == own
    requested = [
        question.tokens
        for number, count in ((WARM_UP_ROUND, 8), (0, REQUESTS), (1, REQUESTS))
        for question in burst(0, number, count, tokens_per_s=350.0, shrink=10.0)
    ]
    assert sorted(tokens for _, tokens in first) == sorted(requested)


def test_an_interrupt_while_engines_load_leaves_none_running(engine_python):
    command = [sys.executable, "-m", "lengthwise.cli", *demo_words(engine_python)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        groups = loading(process, time.monotonic() + BEFORE_S)
        assert living(groups)
        process.send_signal(signal.SIGINT)
        message, _ = process.communicate(timeout=BEFORE_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130, message
    assert "Traceback" not in message
    assert living(groups) == []


def loading(process: subprocess.Popen, end_s: float) -> set[int]:
    """The groups of both engines, when both have been started."""
    groups: set[int] = set()
    while len(groups) < 2:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end_s, groups
        time.sleep(0.1)
        for pid, (parent, group) in processes().items():
            with contextlib.suppress(OSError):
                if parent == process.pid and group == pid and os.fsencode("vllm.entrypoints") in words_of(pid):
                    groups.add(group)
    return groups


def words_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
