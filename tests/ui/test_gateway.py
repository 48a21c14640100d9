"""The Gateway page: the numbers of a running gateway, what it requests, and replays of a journal."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import math
import shlex
import socket
import threading
import time
from functools import cache, reduce

import pytest
from admin_worlds import Served, World
from browser import until
from hypothesis import given
from hypothesis import strategies as st
from passed_traffic import batch_engine

from lengthwise.cli import main
from lengthwise.gateway.observe import Service
from lengthwise.gateway.telemetry import Journal
from lengthwise.schema.errors import InputError
from lengthwise.ui import gateway
from lengthwise.ui.work import COMPLETE, Pool, Task

CHANGE = {"value": -0.2, "low": -0.3, "high": -0.1, "order": "isrtf", "in_use": True, "requests": 900, "is_known": True}


@pytest.fixture(scope="module")
def world():
    return World().live(40, 6).troubled()


@cache  # whose pool has a thread
def task():
    return Task(Pool(threads=1).session(None), "", COMPLETE, lambda _: None)


def journal_of(path, count):
    engines = Service(0.02, 0.001, 0.0002, 0.0, max_num_seqs=8, engines=2, waited_share=0.0, error=0.0)

    async def write():
        async with Journal(path, lambda: 0.0, epoch=lambda: 1e9) as journal:
            for row in sorted(batch_engine(engines, 1, count, rate_rps=4.0), key=lambda row: row.finished_s):
                journal.append(row)

    asyncio.run(write())
    return path.read_bytes()


def test_the_page_has_the_numbers_of_the_admin_port(world, monkeypatch):
    with Served(world.app) as admin:
        found = gateway.live((admin.url,), {"gateway": admin.url, "complete": True}, task())
    now = world.app.state.now()
    values = {card["label"]: card["value"] for card in found["cards"]}
    assert values["Waiting"] == f"{now['queue']['waiting']:,}"
    assert values["In engines"] == f"{now['queue']['running']:,}"
    assert values["Mean JCT against FCFS"] == "\N{EN DASH}"
    assert [row[:2] for row in found["times"]] == [[one["name"], f"{one['count']:,}"] for one in now["times"]]
    assert [row[0] for row in found["engines"]] == [one["name"] for one in now["workers"]]
    assert len(found["errors"]) == len(now["troubles"]) > 0
    monkeypatch.setattr(gateway, "fetched_state", lambda *_: now | {"change": CHANGE})
    card = gateway.live((admin.url,), {"gateway": admin.url}, task())["cards"][-1]
    assert (card["value"], card["interval"]) == ("-20.0 %", "-30.0 % to -10.0 %; simulated on 900 requests")


@pytest.fixture(scope="module")
def state(world):
    return json.loads(json.dumps(world.app.state.now() | {"change": CHANGE}))


def places(value, keys=()):
    yield keys
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value[:3]):
            yield from places(inner, (*keys, key))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


@given(data=st.data())
def test_whatever_an_address_answers_is_shown_or_refused(state, data):
    """Law: no state stops the server with another error than InputError, or gives an answer that is no JSON."""
    keys, value = data.draw(st.sampled_from(sorted(filter(None, places(state)), key=repr))), data.draw(JSON)
    wrong = copy.deepcopy(state)
    reduce(lambda at, key: at[key], keys[:-1], wrong)[keys[-1]] = value
    address = "http://gateway:8001"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gateway, "fetched_state", lambda *_: wrong)
        try:
            found = gateway.live((address,), {"gateway": address}, task())
        except InputError as error:
            assert "is not the state of a gateway" in str(error)  # noqa: PT017 - both outcomes are right
        else:
            json.dumps(found, allow_nan=False)


class Answers:
    """An ASGI app that answers every request with a status, a header and a text."""

    def __init__(self, status, body=b"", headers=()):
        self.status, self.body, self.headers, self.paths = status, body, headers, []

    async def __call__(self, scope, receive, send):
        self.paths.append(scope["path"])
        await send({"type": "http.response.start", "status": self.status, "headers": [*self.headers]})
        await send({"type": "http.response.body", "body": self.body, "more_body": False})


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (Answers(302, headers=[(b"location", b"/elsewhere")]), "answers with status 302"),
        (Answers(404), "answers with status 404"),
        (Answers(401), "set the environment variable LENGTHWISE_ADMIN_TOKEN"),
        (Answers(200, b"<html>"), "is not the state"),
        (Answers(200, b"[" * 100_000), "is not the state"),
        (Answers(200, b" " * (gateway.MAX_STATE_BYTES + 1)), "is not the state"),
    ],
)
def test_only_the_state_of_a_named_address_is_read(answers, message):
    with Served(answers) as other:
        with pytest.raises(InputError, match=message):
            gateway.live((other.url,), {"gateway": other.url}, task())
        with pytest.raises(InputError, match="no gateway named"):
            gateway.live((other.url,), {"gateway": f"{other.url}/x"}, task())
    assert answers.paths == ["/state.json"]


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\nname: ", b"HTTP/1.1 200 OK\r\n\r\n["])
def test_a_gateway_that_does_not_answer_is_an_error_within_the_timeout(monkeypatch, sent):
    """It is silent, or sends a header or a body without an end, a byte at a time."""
    monkeypatch.setattr(gateway, "TIMEOUT_S", 0.2)

    def send(listener):
        with contextlib.suppress(OSError), listener.accept()[0] as connection:  # until the other side closes it
            connection.sendall(sent)
            while sent:
                connection.sendall(b" ")
                time.sleep(0.01)
            connection.recv(1 << 16)
            connection.recv(1 << 16)

    with socket.socket() as slow:
        slow.bind(("127.0.0.1", 0))
        slow.listen()
        server = threading.Thread(target=send, args=(slow,))
        server.start()
        address = f"http://127.0.0.1:{slow.getsockname()[1]}"
        with pytest.raises(InputError, match=r"does not answer .*timed out"):
            gateway.live((address,), {"gateway": address}, task())
        server.join(60)
        assert not server.is_alive()


@pytest.mark.parametrize(
    "address", ["localhost:8001", "file:///etc/passwd", "http://u:p@h", "http://h:99999", "http://h?x"]
)
def test_a_wrong_address_is_refused_at_the_start(address):
    with pytest.raises(InputError, match="must be the admin address"):
        gateway.page([address])


@pytest.mark.parametrize("fields", [{"compare": "routers"}, {"max_wait_s": 20.0}])
@pytest.mark.slow
def test_the_command_gives_the_answer_of_a_replay(fields, tmp_path, capsys):
    (tmp_path / "day.jsonl").write_bytes(journal_of(tmp_path / "written.jsonl", 210))
    one = task()
    fields = fields | {"journal": one.session.store("day.jsonl", (tmp_path / "day.jsonl").read_bytes())}
    outcome = gateway.replay(fields, one)
    found = outcome.answer
    json.dumps(found, allow_nan=False)
    words = shlex.split(found["command"])
    words[words.index("day.jsonl")] = str(tmp_path / "day.jsonl")
    for at, arguments in enumerate([words[1:], ["serve", str(tmp_path / "gateway.toml"), *words[2:4]]]):
        if at and not found["scenario"]:
            continue
        (tmp_path / "gateway.toml").write_text(found["scenario"])
        assert main([*arguments, "--json", str(tmp_path / "found.json")]) == 0
        printed = capsys.readouterr().out
        assert (tmp_path / "found.json").read_bytes() == gateway.page().downloads["json"](outcome, {}).content
        assert all(cell in printed for row in found["rows"] for cell in row if "(" in cell)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "choose the journal"),
        ({"journal": "x"}, "no such file"),
        ({"journal": "x", "compare": "all"}, "no comparison named"),
        ({"journal": "x", "routers": ["./evil.py:route"]}, "no router named"),
        ({"journal": "x", "routers": []}, "routers must be"),
        ({"journal": "x", "max_wait_s": math.inf}, "max_wait_s must be"),
    ],
)
def test_wrong_fields_are_refused_with_one_message(fields, message):
    with pytest.raises(InputError, match=message):
        gateway.replay(fields, task())


@pytest.mark.slow
@pytest.mark.browser
def test_a_gateway_is_shown_while_it_runs_and_a_journal_is_replayed(driver, served, world, tmp_path):
    from tests.ui.test_pages_browser import check, text

    (tmp_path / "day.jsonl").write_bytes(journal_of(tmp_path / "written.jsonl", 210))
    driver.get_log("browser")
    with Served(world.app) as admin, served(gateway.page([admin.url])) as address:
        driver.get(address)
        until(driver, "return document.body.dataset.polls >= 2")
        waiting = world.app.state.now()["queue"]["waiting"]
        assert f"Waiting\n{waiting:,} requests" in driver.find_element("id", "live-cards").text
        assert driver.find_element("id", "admin").get_attribute("href") == f"{admin.url}/"
        driver.find_element("id", "journal").send_keys(str(tmp_path / "day.jsonl"))
        driver.find_element("css selector", "#compare option[value=routers]").click()
        driver.find_element("id", "go").click()
        until(driver, "return document.body.dataset.answers >= 1")
        assert "central queue" in text(driver, "best")
        assert text(driver, "command") == "lengthwise serve --report day.jsonl --router all"
        driver.execute_script("document.getElementById('errors-box').open = true")
        check(driver)
    until(driver, "return !document.getElementById('live-error').hidden")
    assert "does not answer" in text(driver, "live-error")
