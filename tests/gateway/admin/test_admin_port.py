"""The admin port: it tells, it changes nothing, it answers to its own names, it tells no prompt."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace

import pytest
from admin_worlds import EVIL, NAMES, World

from lengthwise.gateway.admin.app import is_allowed_host, page

pytest.importorskip("prometheus_client")


def ask(app, path: str, *, method: str = "GET", host: str = "127.0.0.1:8001"):
    """(status, headers, body)."""
    sent: list[dict] = []

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": path, "method": method, "headers": [(b"host", host.encode())]}
    asyncio.run(app(scope, receive, send))
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], dict(sent[0]["headers"]), body


@pytest.fixture(scope="module")
def busy() -> World:
    return World().live(60, 4.5).troubled()


def test_metrics_are_prometheus_text(busy) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    status, headers, body = ask(busy.app, "/metrics")
    assert status == 200
    assert headers[b"content-type"].startswith(b"text/plain")
    found = {family.name: family for family in text_string_to_metric_families(body.decode())}
    assert {"lengthwise_requests", "lengthwise_backlog_seconds", "lengthwise_worker_up"} <= set(found)
    assert {sample.labels["worker"] for sample in found["lengthwise_worker_limit"].samples} == set(NAMES)


def test_the_state_matches_its_components(busy) -> None:
    reported = json.loads(ask(busy.app, "/state.json")[2])
    now = busy.scheduler.statistics(busy.now_s)
    assert reported["queue"]["waiting"] == now.waiting > 0
    assert [worker["name"] for worker in reported["workers"]] == list(NAMES)
    assert sum(worker["in_flight"] for worker in reported["workers"]) == now.running
    finished = busy.telemetry.metrics.requests
    assert reported["counts"]["outcomes"]["finished"] == sum(
        n for (outcome, _, _), n in finished.items() if outcome == "finished"
    )
    assert reported["lengths"]["count"] == reported["times"][0]["count"] > 50
    assert reported["lengths"]["concordance"] > 0.7
    assert [point[0] for point in reported["lengths"]["calibration"]] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    assert (
        sum(group["count"] for group in reported["times"] if group["name"].startswith("predicted"))
        == (reported["times"][0]["count"])
    )
    assert reported["troubles"][0]["what"] == "failed"
    assert [one["count"] for one in reported["troubles"] if "429" in one["what"]] == [40]


def test_the_queue_is_shown_in_its_order(busy) -> None:
    reported = json.loads(ask(busy.app, "/state.json")[2])["queue"]["order"]
    classes = [one["priority"] for one in reported]
    assert classes == sorted(classes)
    first = [one["left"] for one in reported if one["priority"] == classes[0] and one["queued_for_s"] < 60]
    assert first == sorted(first)


def test_texts_of_others_and_of_engines_are_not_in_the_page_itself(busy) -> None:
    assert EVIL.encode() not in ask(busy.app, "/")[2]
    for path in ("/", "/state.json", "/metrics"):
        assert b"SECRET" not in ask(busy.app, path)[2]


def test_the_analysis_uses_the_latest_configured_order() -> None:
    world = World(mode="observe")
    other = replace(world.config, order=replace(world.config.order, preemption="worth(factor=1)", max_wait_s=5.0))
    assert world.app.monitor.order == world.config.order
    world.app.configure(other)
    assert world.app.monitor.order == other.order


def test_nothing_can_be_changed(busy) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        for path in ("/", "/state.json", "/metrics", "/healthz", "/events"):
            assert ask(busy.app, path, method=method)[0] == 405
    assert ask(busy.app, "/sleep", method="POST")[0] == 404


@pytest.mark.parametrize("path", ["/", "/state.json", "/events", "/metrics"])
def test_names_of_others_are_not_answered(busy, path) -> None:
    assert ask(busy.app, path, host="rebound.attacker.example")[0] == 421
    assert ask(busy.app, path, host="")[0] == 421


def test_probes_are_answered_under_any_name(busy) -> None:
    assert ask(busy.app, "/healthz", host="gateway.example.org")[0] == 200


@pytest.mark.parametrize(
    ("host", "fine"),
    [
        ("localhost:8001", True),
        ("127.0.0.1", True),
        ("[::1]:8001", True),
        ("10.1.2.3:8001", True),
        ("gateway", True),
        ("gateway.llm.svc:8001", True),
        ("admin.mine.example", True),
        ("attacker.example", False),
        ("127.0.0.1.attacker.example", False),
        ("localhost.attacker.example", False),
        ("[::1].attacker.example", False),
        ("[::1]attacker.example:8001", False),
        ("localhost:8001.attacker.example", False),
        (".", False),
        ("", False),
        ("a/b", False),
    ],
)
def test_which_names_are_answered(host, fine) -> None:
    assert is_allowed_host(host, "admin.mine.example") is fine


def test_the_page_fetches_nothing_and_runs_only_its_own_script(busy) -> None:
    status, headers, body = ask(busy.app, "/")
    policy = headers[b"content-security-policy"].decode()
    assert status == 200
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert len(re.findall("'sha256-", policy)) == 2
    text = body.decode()
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert not re.search(r"<(link|script|img|iframe)[^>]*(src|href)=\"(?!data:)", text)
    assert not re.search(r"\son\w+=|style=|innerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    assert len(body) < 60_000
    assert headers[b"x-frame-options"] == b"DENY"
    assert headers[b"cache-control"] == b"no-store"
    assert page()[0] == body


def test_events_come_until_the_client_has_gone() -> None:
    world, sent = World(), []

    async def go() -> None:
        gone = asyncio.Event()

        async def receive():
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)
            if sum(message.get("body", b"").startswith(b"data: ") for message in sent) == 2:
                gone.set()

        async with world.app:
            scope = {"type": "http", "path": "/events", "method": "GET", "headers": [(b"host", b"localhost")]}
            await asyncio.wait_for(world.app(scope, receive, send), 10)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(go())
    assert dict(sent[0]["headers"])[b"content-type"] == b"text/event-stream"
    assert json.loads(sent[1]["body"].removeprefix(b"data: "))["mode"] == "isrtf"


def test_an_observing_gateway_looks_back_by_itself() -> None:
    world = World(mode="observe").live(5, 4.0)

    async def go() -> dict:
        async with world.app:
            while world.app.state.now()["observed"] is None:  # noqa: ASYNC110 - it sends no event
                await asyncio.sleep(0.01)
        assert len(asyncio.all_tasks()) == 1
        return world.app.state.now()["observed"]

    found = asyncio.run(go())
    assert found["decision"] == "not enough traffic"
    assert World(mode="fcfs").app.state.now()["observed"] is None


def test_the_state_of_a_newly_started_gateway_is_empty() -> None:
    reported = json.loads(ask(World(engines=0).app, "/state.json")[2])
    assert (reported["workers"], reported["times"], reported["observed"]) == ([], [], None)
    assert reported["change"] is None
