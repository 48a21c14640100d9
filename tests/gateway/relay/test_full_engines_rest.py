"""A full engine that states its retry time gets nothing until then; refused requests go elsewhere at once."""

from __future__ import annotations

import asyncio
import json

from relay_world import idle, pause, run, until, world
from scripted_engine import Fault, Scripted, answer, encode

from lengthwise.gateway.core import scheduler, worker
from lengthwise.gateway.request import Outcome

BODY = {"model": "m", "prompt": "p 5", "max_tokens": 5, "stream": True, "temperature": 0}


class SaysWhen(Scripted):
    """Says with its refusals when it wants to be asked again."""

    def _complete(self, writer, status, data) -> None:
        body = json.dumps(data).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nRetry-After: 2\r\n" % status)
        writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))


def test_while_one_request_waits_for_the_full_engine_no_other_is_sent_there():
    async def work() -> None:
        engines = [SaysWhen([Fault("503")] * 99), SaysWhen()]
        async with world(engines) as w:
            started_s, tasks = w.driver.clock(), []
            while w.driver.clock() < started_s + 0.5:
                tasks.append(asyncio.ensure_future(w.submit(BODY)))
                await pause(0.02)
            replies = await asyncio.gather(*tasks)
            assert {reply.text for reply in replies} == {answer(encode("p 5"), 5)[1]}
            assert len(engines[0].seen) == 1
            assert w.ledger.cause == ["retried"]
            assert w.fleet.faults == []
            await until(lambda: idle(w))

    run(work)


class Picky(SaysWhen):
    """Refuses one request whenever it comes."""

    async def _served(self, seen, reader, writer) -> None:
        if seen.body["prompt"] == "p 9":
            seen.how = "refused"
            self._complete(writer, 429, {"error": {"message": "does not fit"}})
        else:
            await super()._served(seen, reader, writer)


def test_a_request_that_an_engine_always_refuses_gets_its_answer_while_the_others_are_served(monkeypatch):
    for module in (scheduler, worker):
        monkeypatch.setattr(module, "MAX_BACKOFF_S", 0.05)

    async def work() -> None:
        async with world([Picky()]) as w:
            refused, replies = asyncio.ensure_future(w.submit(BODY | {"prompt": "p 9"})), []
            while not refused.done():
                replies += await asyncio.gather(*(w.submit(BODY) for _ in range(3)))
            reply = await refused
            assert (reply.status, reply.headers[b"retry-after"]) == (429, b"2")
            reported = json.loads(reply.body)["error"]
            assert (reported["code"], "does not fit" in reported["message"]) == ("overloaded", True)
            assert {one.text for one in replies} == {answer(encode("p 5"), 5)[1]}
            assert w.ledger.outcomes == {Outcome.FAILED: 1, Outcome.FINISHED: len(replies)}
            assert sum(one.how == "refused" for one in w.engines[0].seen) >= 3
            assert w.fleet.faults == []
            await until(lambda: idle(w))

    run(work)
