"""The lean backend answers what it is asked: whole, in a stream, paced, several on one connection."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest


@pytest.fixture(scope="module")
def url():
    command = [sys.executable, str(Path(__file__).with_name("lean_engine.py"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


def ask(url, *bodies, path="/v1/chat/completions"):
    """The text of each answer, over one connection, and the seconds of the last."""

    async def run():
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
            texts = []
            for body in bodies:
                start = time.perf_counter()
                async with session.post(url + path, json=body) as answer:
                    assert answer.status == 200
                    texts.append(await answer.text())
            return texts, time.perf_counter() - start

    return asyncio.run(run())


def test_both_response_forms_work(url):
    stream = {"stream": True, "max_tokens": 5, "stream_options": {"include_usage": True}, "return_token_ids": True}
    (complete, streamed, again), _ = ask(url, {"max_tokens": 5}, stream, stream, path="/v1/completions")
    assert json.loads(complete)["choices"][0]["text"]
    assert streamed == again
    events = [line.removeprefix("data: ") for line in streamed.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    read = [json.loads(event) for event in events]
    assert read[-1]["usage"]["completion_tokens"] == 5
    assert sum(len(c["token_ids"]) for e in read for c in e["choices"]) == 5
    assert "".join(c["text"] for e in read for c in e["choices"]) == " word" * 5
    assert read[-2]["choices"][0]["finish_reason"] == "length"


def test_a_pace(url):
    body = {"stream": True, "max_tokens": 11, "messages": [{"role": "user", "content": "<gap:20> hi"}]}
    (text,), seconds = ask(url, body)
    assert text.count(" word") == 11
    assert seconds > 0.19
