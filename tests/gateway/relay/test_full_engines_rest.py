"""A full engine that states its retry time gets nothing until then; refused requests go elsewhere at once."""

from __future__ import annotations

import asyncio
import json

from relay_world import idle, run, until, world
from scripted_engine import Fault, Scripted, answer, encode

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
                await asyncio.sleep(0.02)
            replies = await asyncio.gather(*tasks)
            assert {reply.text for reply in replies} == {answer(encode("p 5"), 5)[1]}
            assert len(engines[0].seen) == 1
            assert w.ledger.cause == ["retried"]
            assert w.fleet.faults == []
            await until(lambda: idle(w))

    run(work)
