"""OpenAI's own client against the edge, as it comes."""

from __future__ import annotations

import openai
import pytest
from edge_serving import SECRET, Script, Served, a_key, chat, config

from lengthwise.gateway.edge.errors import Fault

REQUESTED = {"model": "tiny", "messages": [{"role": "user", "content": "Say hi"}]}


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=served.url, api_key=SECRET, max_retries=0, timeout=20) as client:
        yield client


def test_chats(client, served):
    chats = client.chat.completions.with_raw_response
    raw = chats.create(**REQUESTED, max_tokens=5, extra_headers={"X-Request-Id": "sdk-1"})
    answer = raw.parse()
    assert (answer.choices[0].message.content, answer.usage.completion_tokens) == ("Hi there", 2)
    assert raw.headers["x-request-id"] == "sdk-1"
    requested = served.script.client_request[-1]
    assert requested.client.deadline_s == pytest.approx(requested.arrival_s + 20)


def test_chats_in_a_stream(client):
    with client.chat.completions.create(**REQUESTED, stream=True) as stream:
        assert "".join(event.choices[0].delta.content for event in stream) == "Hi there"


def test_completions_with_and_without_a_stream(client):
    assert client.completions.create(model="tiny", prompt="Say").choices[0].text == "Hi there"
    with client.completions.create(model="tiny", prompt=[1, 2, 3], stream=True) as stream:
        assert "".join(event.choices[0].text for event in stream) == "Hi there"


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny", "org/large"]
    assert client.models.retrieve("org/large").id == "org/large"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("none")


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"model": "none"}, openai.NotFoundError, "model"),
        ({"n": 99}, openai.BadRequestError, "n"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"extra_body": {"priority": -1}}, openai.BadRequestError, "priority"),
    ],
)
def test_errors_are_the_classes_of_the_client(client, fields, error, param):
    with pytest.raises(error) as caught:
        client.chat.completions.create(**(REQUESTED | fields))
    assert caught.value.param == param
    assert caught.value.request_id


def test_a_wrong_key(client):
    with pytest.raises(openai.AuthenticationError, match="Incorrect API key") as caught:
        client.with_options(api_key="sk-no").chat.completions.create(**REQUESTED)
    assert caught.value.code == "invalid_api_key"


def test_an_empty_bucket_and_a_queue_that_is_full():
    script = Script(answers=[Fault(429, "wait", "Too long.", code="rate_limit_exceeded", retry_after_s=3.2)])
    with (
        Served(config(a_key(rate_rps=0.001, burst=1)), script) as served,
        openai.OpenAI(base_url=served.url, api_key=SECRET, max_retries=0) as client,
    ):
        for _ in range(2):
            with pytest.raises(openai.RateLimitError) as caught:
                client.chat.completions.create(**REQUESTED)
            assert caught.value.code == "rate_limit_exceeded"
            assert int(caught.value.response.headers["retry-after"]) >= 4


def test_the_client_retries_when_the_server_requests_it():
    busy = Fault(503, "no_engine", "No engine is up.", retry_after_s=1.0)
    with (
        Served(config(), Script(answers=[busy])) as served,
        openai.OpenAI(base_url=served.url, api_key="any", max_retries=1) as client,
    ):
        assert client.chat.completions.create(**chat()).choices
        assert len(served.script.client_request) == 2


def test_a_body_that_is_too_large(client):
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model="tiny", prompt="x" * 3_000_000)
    assert caught.value.status_code == 413
