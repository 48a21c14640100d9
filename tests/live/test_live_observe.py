"""The guide's way to a decision, walked as a new user would on a vLLM of this machine: observe, end, look back.

What a reader has to fill in is filled in (URL, free ports), and the day is cut to some hundred requests.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lengthwise.gateway.demo.comparison import Question, burst

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "docs"))
from documents import blocks  # noqa: E402

GUIDE = ROOT / "docs" / "guide-gateway.md"
PROGRAM = Path(sys.executable).with_name("lengthwise")
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<a>"
SLOTS, CLIENTS, REQUESTS = 4, 12, 220
"""More clients than slots, so that some requests wait; more requests than a look back needs."""
MAX_TOKENS, LAST_TOKENS = 512, 200
"""The limit of all requests, and the output of one that is in flight when the gateway receives SIGTERM."""
EXACT = 1e-9
"""Of arithmetic."""
ENGINE, CLIENT = "http://localhost:8000", "http://localhost:8080/v1"
QUESTIONS = burst(0, 0, REQUESTS, tokens_per_s=100.0, shrink=20.0)
FREE_PORTS = {"--port 8080": "--port 0 --admin-port 0"}


def walked(word: str) -> str:
    """The guide's first command with that word in it, without the program's name."""
    lines = [line for block in blocks(GUIDE) if block.language == "sh" for line in block.text.splitlines()]
    line = next(line for line in lines if line.startswith("lengthwise serve ") and word in line)
    return line.partition("#")[0].removeprefix("lengthwise ").strip()


def client_code() -> str:
    """How the guide makes OpenAI's client."""
    (block,) = (block for block in blocks(GUIDE) if block.language == "python" and "openai" in block.text)
    return block.text


def decisions() -> set[str]:
    """Those that the guide's table explains."""
    table = GUIDE.read_text("utf-8").partition("| verdict |")[2].partition("\n\n")[0]
    return {line.split("|")[1].strip() for line in table.splitlines()[2:]}


def test_all_that_is_filled_in_stands_in_the_guide():
    """A guide that changes is noticed here, before anything is left as it stands there."""
    observe = walked("--mode observe")
    assert ENGINE in observe
    assert [reported for reported in FREE_PORTS if reported not in observe] == []
    assert CLIENT in client_code()
    journal = shlex.split(observe)[shlex.split(observe).index("--journal") + 1]
    assert shlex.split(walked("--report"))[-1] == journal


def test_the_guide_explains_every_verdict():
    from lengthwise.gateway.observe import ordering_gain

    assert decisions() == {
        ordering_gain.SWITCH_ON, ordering_gain.NO_QUEUE, ordering_gain.EQUAL_LENGTHS, ordering_gain.NO_GAIN,
        ordering_gain.TAIL_LOSES, ordering_gain.NOT_SIGNIFICANT, ordering_gain.BAD_FIT, ordering_gain.OUT_OF_ORDER,
        ordering_gain.NOT_STREAMED, ordering_gain.TOO_FEW,
    }  # fmt: skip


@dataclass(frozen=True)
class Day:
    """What came of a day.

    Attributes:
        head: What the gateway printed at its start.
        page: Its admin page.
        metrics: What Prometheus would have got at the end.
        tokens: [each request] of output that the client was told of.
        log: What the gateway logged.
        status: That it ended with.
        report: What the look back printed.
        numbers: The same as values.
    """

    head: str
    page: str
    metrics: str
    tokens: list[int]
    log: str
    status: int
    report: str
    numbers: dict[str, Any]


@pytest.fixture(scope="module")
def day(tmp_path_factory, engine_python, tiny):
    import openai
    from plugin_engines import vllm

    from lengthwise.gateway.demo.engines import MAKE_MODEL

    place = tmp_path_factory.mktemp("observe")
    (place / "chat.jinja").write_text(TEMPLATE)
    words = ("--max-num-seqs", str(SLOTS), "--chat-template", str(place / "chat.jinja"))
    words += ("--middleware", "forced_length.ForcedLength")
    with vllm(engine_python, tiny, place / "engine.log", *words, path=(MAKE_MODEL.parent,)) as engine:
        with started(place, walked("--mode observe").replace(ENGINE, engine.url)) as (process, head):
            names = {"openai": openai}
            exec(client_code().replace(CLIENT, address(head, "clients")), names)
            with names["client"] as client:
                page = got(address(head, "admin"))
                tokens = sent(client, QUESTIONS)
                metrics = got(address(head, "metrics at"))
                tokens.append(last(client, process))
            status = process.wait(timeout=60)
        engine.check()
    report, numbers = looked_back(place)
    return Day(head, page, metrics, tokens, (place / "log").read_text(), status, report, numbers)


@contextmanager
def started(place: Path, words: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """A gateway as the guide starts it, but at free ports, and what it prints until it is up."""
    for documented, free_port in FREE_PORTS.items():
        words = words.replace(documented, free_port)
    with (place / "log").open("w") as log:
        process = subprocess.Popen(
            [PROGRAM, *shlex.split(words)], cwd=place, stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "curl" in line:
                break
        yield process, "".join(lines)
    finally:
        process.kill()
        process.communicate()


def address(head: str, name: str) -> str:
    """The address that the gateway reports under a name."""
    return re.search(rf"{name} +(http://\S+)", head)[1]


def got(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as reported:
        return reported.read().decode()


def sent(client, requested: list[Question]) -> list[int]:
    """Output tokens of every answer: by some clients, each of whom asks again when it has its answer."""
    with ThreadPoolExecutor(CLIENTS) as clients:
        return list(clients.map(lambda k: answered(client, requested[k], stream=k % 2 == 0), range(len(requested))))


def body(question: str, tokens: int) -> dict[str, Any]:
    """What is asked for: how long the answer will be stands where the engine looks and the gateway does not."""
    fixed = {"vllm_xargs": {"output_tokens": tokens, "max_tokens": MAX_TOKENS}}
    messages = [{"role": "user", "content": question}]
    return {"model": "m", "messages": messages, "max_tokens": MAX_TOKENS, "extra_body": fixed}


def answered(client, question: Question, *, stream: bool) -> int:
    """Output tokens of an answer, streamed or whole."""
    posted = body(question.prompt, question.tokens)
    if not stream:
        return client.chat.completions.create(**posted).usage.completion_tokens
    options = {"include_usage": True}
    parts = list(client.chat.completions.create(**posted, stream=True, stream_options=options))
    return parts[-1].usage.completion_tokens


def last(client, process: subprocess.Popen) -> int:
    """The same of a long one, after whose first token the gateway receives SIGTERM."""
    options = {"include_usage": True}
    parts = client.chat.completions.create(**body("The last one.", LAST_TOKENS), stream=True, stream_options=options)
    for _ in parts:
        break
    process.send_signal(signal.SIGTERM)
    return list(parts)[-1].usage.completion_tokens


def looked_back(place: Path) -> tuple[str, dict[str, Any]]:
    """What the guide's look back prints, and its numbers."""
    command = [PROGRAM, *shlex.split(walked("--report")), "--json", "gain.json"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return done.stdout, json.loads((place / "gain.json").read_text("utf-8"))


@pytest.mark.engine
@pytest.mark.slow
def test_an_observing_gateway_reports_its_mode_and_its_engines(day):
    assert "mode observe (requests pass unchanged and unordered)" in day.head
    assert re.search(r"engine +\S+ +vllm +m +up", day.head)
    assert "<html" in day.page
    assert "lengthwise_requests_total" in day.metrics


@pytest.mark.engine
@pytest.mark.slow
def test_every_request_is_answered_to_the_token_even_if_active_at_the_end(day):
    posted = [question.tokens for question in QUESTIONS]
    assert day.tokens == [*posted, LAST_TOKENS]
    assert day.status == 0
    assert "Traceback" not in day.log


@pytest.mark.engine
@pytest.mark.slow
def test_the_look_back_is_on_exactly_what_was_sent_and_comes_to_a_verdict_of_the_guide(day):
    assert day.numbers["requests"] == len(day.tokens)
    assert f"\n{len(day.tokens)} requests over " in day.report
    decision = day.report.splitlines()[0].removeprefix("Verdict: ")
    assert decision == day.numbers["decision"]
    assert decision in decisions()
    assert decision not in ("not enough traffic", "unknown: responses are not streamed")


@pytest.mark.engine
@pytest.mark.slow
def test_all_numbers_of_the_analysis_are_present_with_their_intervals(day):
    reported = day.numbers
    assert {order["name"] for order in reported["orders"]} == {"srtf", "isrtf", "oracle"}
    for order in reported["orders"]:
        for change in (order["mean"], order["p99"]):
            assert -1 < change["low"] <= change["value"] + EXACT
            assert change["value"] - EXACT <= change["high"] < math.inf
        assert min(order["mean_jct_s"], order["p99_jct_s"]) > 0
    seen = ("span_s", "observed_jct_s", "fcfs_jct_s", "fcfs_p99_jct_s")
    assert all(reported[name] is not None and 0 < reported[name] < math.inf for name in seen)
    assert 0 <= reported["waited_share"] <= 1
    assert reported["in_order"]
    assert reported["model_error"] is not None
    (service,) = reported["services"]
    assert service["engines"] == 1
    assert "nan" not in day.report
    assert "Intervals: 97.5 % each" in day.report
