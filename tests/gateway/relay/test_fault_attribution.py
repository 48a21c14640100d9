"""Who is blamed goes by the engine itself, not by its name, and by who asks, not by what is asked."""

from __future__ import annotations

from relay_world import BARE, FixedFleet, FixedWorker, requested, run, world
from scripted_engine import Fault, Scripted

from lengthwise.gateway.relay.failures import FailureAttribution, UpstreamError

BODY = {"model": "m", "prompt": "hi", "max_tokens": 60, "stream": True}


def reported(message: list[tuple[str, object]], fleet: FixedFleet) -> None:
    fleet.record_error_response = lambda name, owner: message.append((name, owner))


def no() -> UpstreamError:
    return UpstreamError("http 500", "no", status=500)


def renamed(fleet: FixedFleet) -> tuple[FixedWorker, FixedWorker]:
    """The engine "e" leaves, another one has its name."""
    old, new = fleet.worker("e"), FixedWorker("e", "http://new", BARE, None)
    old.name = "e (leaving 0)"
    fleet.by_name = {old.name: old, "e": new}
    return old, new


def test_the_errors_of_an_engine_stay_its_own_when_its_name_is_reused():
    fleet = FixedFleet([FixedWorker("e", "http://old", BARE, None)], None)
    blame = FailureAttribution(fleet, requested(BODY))
    blame.worker = fleet.worker("e")
    blame.on_error(no())
    _, new = renamed(fleet)
    blame.worker = new
    blame.on_error(no())
    assert blame.is_request_fault(), "two engines refused, and there is no other"


def test_a_successor_that_serves_the_request_shows_the_fault_of_the_old_engine():
    fleet, stated = FixedFleet([FixedWorker("e", "http://old", BARE, None)], None), []
    reported(stated, fleet)
    blame = FailureAttribution(fleet, requested(BODY))
    blame.worker = fleet.worker("e")
    blame.on_error(no())
    old, new = renamed(fleet)
    blame.worker = new
    blame.on_error(no())
    third = FixedWorker("third", "http://third", BARE, None)
    fleet.by_name["third"] = third
    blame.worker = third
    blame.on_first_output()
    blame.on_finished()
    assert stated == [(old.name, None), ("e", None)]


def test_a_client_that_varies_its_bodies_is_still_one_owner():
    async def work() -> None:
        async with world([Scripted(plan=[Fault("error", 9)] * 4)], capabilities=BARE) as w:
            stated: list[tuple[str, object]] = []
            reported(stated, w.fleet)
            for number, address in enumerate(["10.0.0.1", "10.0.0.1", "10.0.0.1", "10.0.0.2"]):
                client = {"address": address, "session": f"s{number}"}
                one = requested(BODY | {"prompt": f"hi {number}"}, now_s=w.driver.clock(), **client)
                answer = await w.relay.serve(one)
                assert b"engine dead" in b"".join([part async for part in answer])
                await answer.aclose()
            assert stated == [("w0", "10.0.0.1")] * 3 + [("w0", "10.0.0.2")]

    run(work)
