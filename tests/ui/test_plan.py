"""The planner's answers, and its server as clients and attackers see it."""

from __future__ import annotations

import http.client
import json
import re
import shlex
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from lengthwise.cli import main
from lengthwise.config import loads
from lengthwise.config.files import examples_folder
from lengthwise.schema.errors import InputError
from lengthwise.ui import applications, gateway, plan, server, studies
from lengthwise.ui.page import Page, html
from lengthwise.ui.work import FIRST, Pool, Task


def send(address, path="/answers/plan/answer", body=b"{}", method="POST", **headers):
    """Return status, headers and text of a request."""
    at = urlsplit(address)
    connection = http.client.HTTPConnection(at.hostname, at.port, timeout=60)
    connection.request(method, path, body, {"content-type": "application/json"} | headers)
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read().decode()
    connection.close()
    return found


@pytest.mark.parametrize("fields", [{}, {"workload": "300/40", "policy": "orca", "tp": 2, "replicas": 2, "ttft": "2s"},
                                    {"usd_per_hour": 0.25, "pp": 2, "tp": 1}])  # fmt: skip
def test_the_command_gives_the_numbers_of_the_page(fields, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = plan.answer({"gpu": "L40S", "rate": 3.0, **fields}, complete=True)
    for name, text in found["gpu_files"].items():
        (tmp_path / name).write_text(text)
    if "usd_per_hour" in fields:
        assert found["deployment"] == "2 x L40S, tp 1, pp 2, 0.50 $/h"
    words = shlex.split(found["command"])
    assert main([*words[1:], "--json", str(tmp_path / "numbers.json")]) == 0
    capsys.readouterr()
    (by_command,) = json.loads((tmp_path / "numbers.json").read_text())["results"]
    chart = found["charts"]["ttft"]
    chosen = chart["rates"].index(3.0)
    assert chart["values"][chosen] == pytest.approx(by_command["summary"]["ttft_s"]["p90"]["value"])
    assert chart["half_widths"][chosen] == pytest.approx(by_command["summary"]["ttft_s"]["p90"]["half_width"])
    assert loads(found["scenario"]).to_toml() == by_command["scenario"].replace(f"{tmp_path}/", "")


def test_a_complete_answer_has_intervals_and_the_first_one_is_a_seed_of_it():
    first, complete = (plan.answer({"rate": 5.0}, complete=complete) for complete in (False, True))
    ttft = next(card for card in complete["cards"] if card["label"] == "TTFT p50")
    assert ttft["interval"].startswith("±")
    assert ttft["model"].startswith("(")
    assert [card["label"] for card in first["cards"]] == [card["label"] for card in complete["cards"]]
    assert all(width is not None for width in complete["charts"]["ttft"]["half_widths"])
    low, high = (chart["charts"]["goodput"]["values"][0] for chart in (first, complete))
    assert low == pytest.approx(high, rel=0.2)


@pytest.fixture
def task():
    return Task(Pool(threads=1).session(None), "", FIRST, lambda _: None)


@pytest.mark.parametrize(
    ("head", "times", "unit"),
    [
        ("when,in_toks,out_toks", [f"2024-05-01 10:00:{at:02d}.5" for at in range(60)], "dates"),
        ("t_s;in_toks;out_toks", [str(at) for at in reversed(range(60))], "seconds"),
        ("t_us;in_toks;out_toks", [str(1e6 * at) for at in reversed(range(60))], "microseconds"),
    ],
)
def test_a_trace_with_unknown_columns_gives_the_numbers_of_its_command(task, tmp_path, capsys, head, times, unit):
    rows = [head.replace(";", ","), *(f"{time},{100 + at},{20 + at % 7}" for at, time in enumerate(times))]
    uploaded = task.session.store("my trace.csv", "\n".join(rows).encode())
    found = plan.columns({"file": uploaded}, task)
    assert list(found["guesses"].values())[1:] == ["in_toks", "out_toks"]
    assert (found["guesses"]["arrival"], found["unit"]) == (found["columns"][0], unit)
    mapped = plan.trace({"file": uploaded, **found["guesses"], "arrival": found["columns"][0], "unit": unit}, task)
    assert (mapped["requests"], mapped["rate"]) == (60, pytest.approx(1.0))
    assert mapped["prompt"] == pytest.approx(129.5)
    fields = {"trace_file": mapped["file"], "trace_columns": mapped["columns_by_name"]}
    fields |= {"rate": 2.0, "replay": unit == "dates"}
    page = plan.answer(fields, complete=True, files=task.session.file)
    words = shlex.split(page["command"])
    name = "my trace.csv" if mapped["columns_by_name"] else "my trace-converted.csv"
    words[words.index(name)] = str(task.session.file(mapped["file"]))
    assert main([*words[1:], "--json", str(tmp_path / "numbers.json")]) == 0
    capsys.readouterr()
    (by_command,) = json.loads((tmp_path / "numbers.json").read_text())["results"]
    chart = page["charts"]["ttft"]
    ttft = by_command["summary"]["ttft_s"]["p90"]["value"]
    assert chart["values"][chart["rates"].index(2.0)] == pytest.approx(ttft)


def test_files_that_are_no_traces_or_models_are_refused_with_one_message(task):
    def refuses(function, values, message):
        with pytest.raises(InputError, match=message):
            function(values, task)

    image = task.session.store("image.csv", b"\x89PNG\xff\xfe")
    refuses(plan.columns, {"file": image}, "image.csv")
    refuses(plan.columns, {"file": "../etc/passwd"}, "no such file")
    rows = task.session.store("rows.csv", b"a,b,c\n1,2,3\nx,2,3\n")
    roles = {"arrival": "a", "prompt": "b", "output": "c"}
    refuses(plan.trace, {"file": rows, **roles, "unit": "seconds"}, "^rows.csv, line 3.*'x'")
    refuses(plan.trace, {"file": rows, **roles, "prompt": "d", "unit": "seconds"}, "column 'd'")
    refuses(plan.trace, {"file": rows, **roles, "unit": "weeks"}, "no unit of time")
    model = task.session.store("config.json", b'{"hidden_size": "x"}')
    refuses(
        lambda values, _: plan.answer(values, complete=False, files=task.session.file),
        {"model_file": model},
        "config.json",
    )


def test_sessions_and_a_config_file_are_settings_of_the_command(task):
    config = Path(__file__).parents[2] / "examples/models/tiny/config.json"
    model = task.session.store("config.json", config.read_bytes())
    found = plan.answer({"turns": 4.0, "rate": 2.0, "model_file": model}, complete=False, files=task.session.file)
    assert "workload.sessions.turns=4" in found["command"]
    assert "--model config.json" in found["command"]
    assert loads(found["scenario"]).workload.session_rate == pytest.approx(0.5)


def test_the_parts_of_a_request_sum_up_to_its_time():
    found = plan.answer({"rate": 5.0}, complete=False)
    assert [one["part"] for one in found["shares"]] == ["queue", "prefill", "decode"]
    assert all(one["mean_s"] >= 0 for one in found["shares"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "llama-3.1-9b"}, "llama-3.1-8b"),
        ({"model": "/etc/passwd"}, "no model named"),
        ({"workload": "trace.csv"}, "no workload named"),
        ({"policy": "./evil.py:rank"}, "no scheduler named"),
        ({"gpu": ["H100"]}, "no GPU named"),
        ({"rate": 0}, "rate must be"),
        ({"rate": True}, "rate must be"),
        ({"replicas": 1e9}, "replicas must be"),
        ({"ttft": "1s\nrun.seeds=5"}, "ttft must be"),
        ({"gpu": "L4", "model": "llama-3.1-405b"}, "No tp up to 16 fits"),
        ({"no": 1}, "no field named 'no'"),
    ],
)
def test_wrong_fields_are_refused_with_one_message(fields, message):
    with pytest.raises(InputError, match=message.replace(".", r"\.")):
        plan.answer(fields, complete=False)


def test_the_server_answers_and_refuses(planner):
    status, headers, text = send(planner, body=b'{"rate": 2}')
    assert status == 200
    assert json.loads(text)["cards"]
    assert headers["x-content-type-options"] == "nosniff"
    assert send(planner, body=b'{"rate": -2}')[0] == 400
    assert send(planner, body=b"{")[0] == 400
    assert send(planner, body=b"[]")[0] == 400
    assert send(planner, body=b" " * (server.MAX_BODY_BYTES + 1))[0] == 413
    assert send(planner, **{"content-type": "text/plain"})[0] == 415
    assert send(planner, method="GET")[0] == 405
    assert send(planner, host="attacker.example")[0] == 400
    assert send(planner, "/../../etc/passwd", method="GET")[0] == 404
    assert send(planner, "/healthz", method="GET")[0] == 200


def test_a_page_is_small_and_loads_nothing_from_elsewhere(planner):
    status, headers, text = send(planner, "/", method="GET")
    assert status == 200
    assert len(text) < 500_000
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "//" not in text.replace('"http://www.w3.org/2000/svg"', "").replace("// ", "")


def test_a_browser_sees_its_own_jobs_and_files_alone(planner):
    fields = b'{"schedulers": ["FCFS"], "workload": "100/20", "num_requests": 100, "seeds": 2}'

    def cookie():
        return send(planner, "/", method="GET")[1]["set-cookie"].partition(";")[0]

    own, other = cookie(), cookie()
    assert own != other
    job = json.loads(send(planner, "/jobs/schedulers/run", fields, cookie=own)[2])["job"]
    status, end = 202, time.monotonic() + 120
    while status == 202 and time.monotonic() < end:
        status, _, text = send(planner, f"/jobs/{job}", method="GET", cookie=own)
    assert status == 200
    assert json.loads(text)["schedulers"]
    for stranger in ({"cookie": other}, {}):
        assert "no such job" in send(planner, f"/jobs/{job}", method="GET", **stranger)[2]
        assert "no such job" in send(planner, f"/jobs/{job}/schedulers/report", **stranger)[2]
        assert send(planner, f"/jobs/{job}", method="DELETE", **stranger)[0] == 400
    assert send(planner, f"/jobs/{job}/schedulers/report", cookie=own)[0] == 404  # this page has none
    upload = {"cookie": own, "content-type": "application/octet-stream"}
    file = json.loads(send(planner, "/files?name=../../a.csv", b"x,y\n1,2\n", **upload)[2])["file"]
    body = json.dumps({"file": file}).encode()
    assert "columns" in send(planner, "/answers/plan/columns", body, cookie=own)[2]
    assert "no such file" in send(planner, "/answers/plan/columns", body, cookie=other)[2]
    assert send(planner, "/files", b"x", cookie=own)[0] == 415


@pytest.mark.parametrize("page", [*server.PAGES, applications.page(examples_folder()), gateway.page(), studies.PAGE])
def test_no_name_is_declared_twice_in_the_script_of_a_page(page):
    text, _ = html(page, server.PAGES)
    names = Counter(re.findall(r"(?m)^(?:async )?(?:function|const|let) (\w+)", text))
    assert [name for name, count in names.items() if count > 1] == []


def test_an_unexpected_error_is_json_with_its_name_and_its_traceback_is_in_the_terminal(capfd):
    from starlette.testclient import TestClient

    def fails(_values, _task):
        return {}["absent"]

    client = TestClient(server.app(pages=(Page("broken", "Broken", answers={"answer": fails}),)))
    client.base_url = "http://127.0.0.1"
    answer = client.post("/answers/broken/answer", json={})
    assert (answer.status_code, answer.json()["error"]) == (
        500,
        "the server failed (KeyError); its terminal has the traceback",
    )
    assert "KeyError: 'absent'" in capfd.readouterr().err
    unknown = client.get("/search/no-such-page", headers={"accept": "text/html"})
    assert unknown.status_code == 404
    assert 'href="../api"' in unknown.text
    assert client.get("/no").json() == {"error": "Not Found"}
    assert "curl -s http://127.0.0.1/api/simulate" in client.get("/api").text


def test_with_a_token_nothing_is_served_without_it():
    from starlette.testclient import TestClient

    client = TestClient(server.app("secret", "0.0.0.0"))
    assert client.get("/").status_code == 401
    assert client.post("/answers/plan/answer", json={}).status_code == 401
    assert client.get("/api/openapi.json").status_code == 401
    assert client.get("/?token=wrong").status_code == 401
    assert client.get("/?token=secret").status_code == 200
    assert client.get("/").status_code == 200  # by the cookie
    assert len(server.new_token()) >= 32
