"""Predictors that read generated text receive it, and no other predictor pays for that."""

from __future__ import annotations

import pytest
from relay_world import Report, run, world
from scripted_engine import Scripted, answer, encode

from lengthwise.gateway.config import Order
from lengthwise.gateway.relay import Relay

ORDER = Order(mode="isrtf", window_tokens=10)


class Reader(Report):
    """Notes the texts that it is given."""

    def __init__(self, *, reads_output: tuple[int, int] | None) -> None:
        self.reads_output = reads_output
        self.given: list[str | None] = []

    async def repredict(self, request, text, generated_text):
        self.given.append(generated_text)
        return request.length_prediction


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_a_predictor_that_reads_is_given_the_text_so_far(api):
    async def work() -> None:
        async with world([Scripted()], order=ORDER) as w:
            reader = Reader(reads_output=(1, 1000))
            w.relay = Relay(w.driver, w.fleet, reader, w.relay.config)
            prompt = {"messages": [{"role": "user", "content": "p"}]} if api == "chat" else {"prompt": "p"}
            reply = await w.submit({"model": "m", "max_tokens": 45, "stream": True, **prompt}, api=api)
            assert len(reader.given) == 4
            assert all(text and reply.text.startswith(text) for text in reader.given)
            assert reader.given == sorted(reader.given, key=len)
            await w.relay.aclose()

    run(work)


def test_a_predictor_that_does_not_read_gets_no_output():
    async def work() -> None:
        async with world([Scripted()], order=ORDER) as w:
            reader = Reader(reads_output=None)
            w.relay = Relay(w.driver, w.fleet, reader, w.relay.config)
            reply = await w.submit({"model": "m", "max_tokens": 25, "stream": True, "prompt": "p"})
            assert reader.given == [None, None]
            assert reply.text == answer(encode("p"), 25)[1]
            await w.relay.aclose()

    run(work)
