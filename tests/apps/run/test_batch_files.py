"""OpenAI's batch files: every request is asked as it stands, and answered in its place."""

from __future__ import annotations

import asyncio
import json

import pytest
from engines_world import QUICK, job_of, local, plan, play

from lengthwise.apps.app import Model
from lengthwise.apps.expand import TemplateDecider, expand
from lengthwise.apps.inputs import read_batch, write_batch
from lengthwise.apps.ledger import open_ledger
from lengthwise.apps.run import export
from lengthwise.schema.errors import InputError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def request(name, model="m0", url=CHAT, **body):
    stated = (
        {"messages": [{"role": "user", "content": "{{ never }} rendered"}]} if url == CHAT else {"prompt": "Say {% x"}
    )
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": model, **stated, **body}}


def file_of(folder, *lines):
    path = folder / "batch.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def requested(batch):
    expanded = expand(batch.app, batch.rows.rows, batch.rows.ids)
    decider = TemplateDecider(expanded)
    return expanded.tasks, [decider.decide(task, lambda _: None) for task in range(len(expanded.tasks))]


def test_requests_are_passed_on_as_they_stand(tmp_path):
    lines = [
        request("one", max_tokens=7, temperature=0, stop=["\n"], vendor_field={"a": 1}),
        request("two", "m1", COMPLETIONS, max_tokens=3, temperature=0),
        request("three", "m1", temperature=0, seed=4),
    ]
    batch = read_batch(file_of(tmp_path, *lines))
    tasks, found = requested(batch)
    assert len(tasks) == 3
    by_row = {int(tasks.row[task]): one for task, one in enumerate(found)}
    for row, line in enumerate(lines):
        body = {name: value for name, value in line["body"].items() if name != "model"}
        assert by_row[row].request.body == body
        assert by_row[row].request.api == ("chat" if line["url"] == CHAT else "completions")
    of_row = {int(tasks.row[task]): task for task in range(3)}
    assert [tasks.models[tasks.model[of_row[row]]] for row in range(3)] == ["m0", "m1", "m1"]
    assert [int(tasks.max_tokens[of_row[row]]) for row in range(2)] == [7, 3]
    assert int(tasks.max_tokens[of_row[2]]) > 1_000_000


def test_equal_requests_share_an_answer_only_where_nothing_is_left_to_chance(tmp_path):
    greedy = read_batch(file_of(tmp_path, *(request(name, temperature=0) for name in "ab")))
    assert len({one.key for one in requested(greedy)[1]}) == 1
    drawn = read_batch(file_of(tmp_path, *(request(name) for name in "ab")))
    first, again = requested(drawn)[1], requested(drawn)[1]
    assert len({one.key for one in first}) == 2
    assert [one.key for one in first] == [one.key for one in again]
    assert all("seed" in one.request.body for one in first)


def test_a_completion_without_a_limit_is_as_short_as_the_api_makes_it(tmp_path):
    tasks, found = requested(read_batch(file_of(tmp_path, request("a", url=COMPLETIONS))))
    assert tasks.max_tokens.tolist() == [16]
    assert "max_tokens" not in found[0].request.body


def test_known_facts_of_models_are_retained(tmp_path):
    path = file_of(tmp_path, request("a", "m0"), request("b", "m1"))
    known = Model("m1", "vicuna-13b", weights="./there")
    assert read_batch(path, [known]).app.models == (Model("m0"), known)
    with pytest.raises(InputError, match=r"there is no model in .*batch.jsonl named 'm2'. Did you mean: m"):
        read_batch(path, [Model("m2")])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (request("b") | {"url": "/v1/embeddings"}, "no url of a batch named '/v1/embeddings'"),
        (request("b") | {"method": "GET"}, "method must be POST; it is 'GET'"),
        (request("b") | {"body": 3}, "body must be a table"),
        (request("b", model=""), "body.model must name a model"),
        (request("b", messages="hello"), "body.messages must be a list"),
        (request("b", url=COMPLETIONS, prompt=["x", "y"]), "body.prompt must be one text"),
        (request("b", n=2), "body.n must be 1"),
        (request("b", tools=[{}]), "body.tools is not supported"),
        (request("b", max_tokens=0), "body.max_tokens must be whole tokens of at least 1; it is 0"),
        (request("a"), "'a' is also in line 1"),
        ({"method": "POST"} | {k: v for k, v in request("b").items() if k != "custom_id"}, "named 'custom_id'"),
    ],
)
def test_an_invalid_request_is_reported_with_its_line(tmp_path, line, message):
    path = file_of(tmp_path, request("a"), line)
    with pytest.raises(InputError) as error:
        read_batch(path)
    assert f"{path}, line 2: " in str(error.value)
    assert message in str(error.value)


def test_a_batch_is_answered_in_its_order(tmp_path):
    lines = [request(f"r{i}", f"m{i % 2}", (CHAT, COMPLETIONS)[i % 3 == 0], max_tokens=5 + i) for i in range(9)]
    batch = read_batch(file_of(tmp_path, *lines))
    expanded = expand(batch.app, batch.rows.rows, batch.rows.ids)
    job = job_of(
        expanded.tasks, [(plan(0), plan(1))], decider=TemplateDecider(expanded), words=batch.rows.sha256, settings=QUICK
    )
    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        finished = asyncio.run(play(job, ledger, local(tmp_path, ["m0", "m1"])))
        assert finished.exit_code == 0
        export(ledger, job.layout, tmp_path, ids=lambda row: batch.rows.ids[row])
    answers, errors = tmp_path / "answers.jsonl", tmp_path / "errors.jsonl"
    assert write_batch(tmp_path / "outputs.jsonl", tmp_path / "dead.jsonl", answers, errors, created_s=5) == (9, 0)
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [one["custom_id"] for one in found] == [line["custom_id"] for line in lines]
    for one, line in zip(found, lines, strict=True):
        body = one["response"]["body"]
        assert one["response"]["status_code"] == 200
        assert body["model"] == line["body"]["model"]
        assert body["usage"]["completion_tokens"] <= line["body"]["max_tokens"]
        choice = body["choices"][0]
        assert (choice["message"]["content"] if line["url"] == CHAT else choice["text"]) != ""
    assert errors.read_text() == ""


def test_requests_without_an_answer_are_errors(tmp_path):
    (tmp_path / "outputs.jsonl").write_text("")
    dead = {"id": "b", "call": "chat", "round": 0, "index": 0, "model": "m0", "state": "dead", "attempts": 3}
    (tmp_path / "dead.jsonl").write_text(json.dumps(dead | {"error": "too long"}) + "\n")
    answers, errors = tmp_path / "answers.jsonl", tmp_path / "errors.jsonl"
    assert write_batch(tmp_path / "outputs.jsonl", tmp_path / "dead.jsonl", answers, errors) == (0, 1)
    line = json.loads(errors.read_text())
    assert line["custom_id"] == "b"
    assert line["response"] is None
    assert line["error"] == {"code": "dead", "message": "too long"}
