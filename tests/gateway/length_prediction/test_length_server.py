"""The length server: answers equal to the predictor's, conditioning and caps, calibration, hints, refusals."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import asynccontextmanager

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.cli import main
from lengthwise.gateway.background import on_thread
from lengthwise.gateway.config import Limits, PredictionConfig
from lengthwise.gateway.length_server import HINTS, CappedLength, LengthServer, LengthServerConfig, running
from lengthwise.predict import BucketEcdf, Conformal, LengthDistribution, Prompts, Samples, default, save

ESSAY, FACT = "Write an essay about the rivers of Europe.", "Is it raining? Answer yes or no."
TASKS = {"Name the capital of": 8, "Explain the history of": 160, "Write an essay about": 420}


def chat(text=ESSAY, **more):
    return {"model": "llama", "messages": [{"role": "user", "content": text}], **more}


async def ask(app, path, body=None, method="POST", **headers):
    """The status, headers and JSON of an answer of the ASGI app."""
    given_body = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    sent = []

    async def receive():
        return {"type": "http.request", "body": given_body, "more_body": False}

    async def send(message):
        sent.append(message)

    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    await app({"type": "http", "method": method, "path": path, "headers": named}, receive, send)
    return sent[0]["status"], dict(sent[0]["headers"]), json.loads(sent[1]["body"])


def answers(*posted, config=None):
    """The answers to (path, body) in order."""

    async def run():
        async with LengthServer(config or LengthServerConfig()) as app:
            return [await ask(app, *one) for one in posted]

    return asyncio.run(run())


def settings(**prediction):
    return LengthServerConfig(PredictionConfig(**prediction))


@pytest.mark.parametrize(
    "body", [chat(), {"model": "llama", "prompt": FACT}, chat(FACT, model="falcon-7b-sft-mix-2000")]
)
def test_an_answer_is_that_of_the_predictor(body) -> None:
    text = body.get("prompt") or body["messages"][0]["content"]
    expected = default().predict(Prompts(1, [text], model=[body["model"]]))
    levels = [0.05, 0.5, 0.9, 0.95]
    ((status, _, answer),) = answers(("/v1/lengths", body | {"lengths": {"quantiles": levels, "thresholds": [100]}}))
    assert status == 200
    assert answer["source"] == "predictor"
    found = [answer["quantiles"][f"{level:g}"] for level in levels]
    np.testing.assert_allclose(found, [expected.quantile(level)[0] for level in levels])
    assert answer["mean"] == pytest.approx(expected.mean[0])
    assert answer["exceeds"]["100"] == pytest.approx(1 - expected.cdf(100)[0])
    assert answer["predictor"]["id"].startswith("default-")
    held_out, _ = answer["predictor"]["calibration"]
    assert held_out["coverage"] == default().metadata_["held_out"]["coverage90"][0]


ROWS = st.lists(st.floats(1, 5000), min_size=25, max_size=25).map(np.sort)


@given(ROWS, st.integers(0, 6000), st.integers(1, 8000), st.integers(0, 8000), st.floats(0, 1))
def test_generated_tokens_change_a_length_only_as_survival_does_and_a_cap_only_cuts(row, generated, more, at, level):
    cap = generated + more
    free, given_some, capped = (CappedLength(row, g, c) for g, c in ((0, 10**9), (generated, 10**9), (generated, cap)))
    if generated < row[-1] and at > generated:
        assert given_some.exceeds(at) * free.exceeds(generated) == pytest.approx(free.exceeds(at), abs=1e-9)
    assert given_some.exceeds(generated) == (1.0 if generated else pytest.approx(1.0))
    assert capped.exceeds(at) == (given_some.exceeds(at) if at < cap else 0.0)
    assert capped.quantile(level) == min(given_some.quantile(level), cap)
    assert generated < capped.quantile(level) <= cap
    assert generated + 1 <= capped.mean() <= cap
    assert given_some.exceeds(given_some.quantile(level)) <= 1 - level + 1e-9


@given(ROWS, st.integers(0, 6000), st.integers(1, 8000))
def test_a_mean_is_that_of_the_distribution_without_what_the_cap_cuts(row, generated, more) -> None:
    """E[min(X, c) | X > g] = g + E[X - g | X > g] - P(X > c | X > g) E[X - c | X > c], remainders at least 1."""
    length, cap = LengthDistribution.of(row), generated + more
    expected = generated + length.remaining(generated)[0]
    if generated < row[-1]:
        expected -= CappedLength(row, generated, 10**9).exceeds(cap) * length.remaining(cap)[0]
        assert CappedLength(row, generated, cap).mean() == pytest.approx(expected, abs=1.001)
    else:  # the tail is cut at its 99 % quantile
        assert CappedLength(row, generated, 10**9).mean() == pytest.approx(expected, rel=0.1)


def test_a_bin_needs_information_or_certainty() -> None:
    unknown = {"model": "unknown", "prompt": [1, 2, 3]}
    posted = [
        unknown, unknown | {"max_tokens": 100}, unknown | {"lengths": {"generated_tokens": 3000}}, chat(FACT),
        unknown | {"max_tokens": 3000, "min_tokens": 3000, "ignore_eos": True},
    ]  # fmt: skip
    found = [answer["bin"] for _, _, answer in answers(*(("/v1/lengths", body) for body in posted))]
    assert found == ["UNKNOWN", "SHORT", "LONG", "SHORT", "LONG"]


def outputs(seed, n, scale=1.0):
    """Prompts of three kinds with log-normal lengths."""
    rng = np.random.default_rng(seed)
    for number in range(n):
        task = list(TASKS)[number % 3]
        yield f"{task} country {number % 60}", int(scale * TASKS[task] * rng.lognormal(0, 0.4)) + 1


async def covered(config, samples) -> list[bool]:
    """Whether each output is within its 0.9 quantile; each is reported to the server after its prediction."""
    inside = []
    async with LengthServer(config) as app:
        for number, (text, tokens) in enumerate(samples):
            name = f"r{number}"
            _, _, answer = await ask(app, "/v1/lengths", chat(text), x_request_id=name)
            inside.append(tokens <= answer["quantiles"]["0.9"])
            status, _, _ = await ask(app, "/v1/lengths/observed", {"id": name, "output_tokens": tokens})
            assert status == (200 if config.prediction.learn else 409)
    return inside


def within_binomial_bounds(inside) -> bool:
    """Whether the share is 0.9 up to 4 standard deviations, doubled as the calibration set is no larger."""
    return abs(np.mean(inside) - 0.9) <= 4 * np.sqrt(2 * 0.09 / len(inside))


def test_a_trained_predictor_covers_held_back_outputs(tmp_path) -> None:
    rows = list(outputs(0, 900))
    texts, tokens = [text for text, _ in rows], np.array([n for _, n in rows])
    samples = Samples(Prompts(len(rows), texts, model=["llama"] * len(rows)), tokens, np.zeros(len(rows), bool))
    predictor = Conformal(BucketEcdf(by=("model", "prompt_chars")), seed=0).fit(samples)
    save(predictor, tmp_path / "mine.lwp")
    config = settings(predictor=str(tmp_path / "mine.lwp"), learn=False)
    assert within_binomial_bounds(asyncio.run(covered(config, outputs(1, 300))))


@pytest.mark.slow
def test_reported_lengths_calibrate_the_quantiles() -> None:
    """The outputs of this model are four times those that the shipped predictor knows."""
    inside = asyncio.run(covered(settings(), outputs(2, 700, scale=4.0)))
    assert np.mean(inside[:20]) < 0.75
    assert within_binomial_bounds(inside[300:])


AGENT_HINTS = {
    "type": "object",
    "required": ["osl"],
    "additionalProperties": False,
    "properties": {
        "priority": {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1},
        "strict_priority": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1},
        "osl": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1},
        "speculative_prefill": {"type": "boolean"},
        "latency_sensitivity": {"type": "number"},
    },
}
"""dynamo, lib/llm/src/protocols/openai/nvext.rs and docs/components/frontend/nvext.md: AgentHints."""
HEADERS = {
    "smg": ("x-smg-output-token-estimate", "[1-9][0-9]{0,9}"),  # model_gateway: parsed as u32, above 0
    "production-stack": ("x-request-priority", "-?[0-9]+"),  # tutorials/assets/values-26-priority-routing.yaml
    "llm-d": ("x-llm-d-inference-objective", "lengthwise-(short|unknown|long)"),  # names of deploy/llm-d
    "kserve": ("x-llm-d-inference-objective", "lengthwise-(short|unknown|long)"),
}


def test_each_hint_is_what_its_router_reads() -> None:
    body = chat(nvext={"agent_hints": {"priority": 5}, "annotations": ["a"]}, temperature=0.5)
    found = answers(("/v1/lengths", body), *((f"/v1/hints/{name}", body) for name in HINTS))
    mean, hints = found[0][2]["mean"], dict(zip(HINTS, found[1:], strict=True))
    assert set(hints) == {"dynamo", *HEADERS}
    for name, (header, pattern) in HEADERS.items():
        status, headers, answer = hints[name]
        assert status == 200
        assert answer["headers"] == {header: headers[header.encode()].decode()}
        assert re.fullmatch(pattern, answer["headers"][header])
        assert answer["body"] is None
    for name in ("smg", "production-stack"):
        assert int(*hints[name][2]["headers"].values()) == round(mean)
    extended = hints["dynamo"][2]["body"]
    jsonschema.validate(extended["nvext"]["agent_hints"], AGENT_HINTS)
    assert extended["nvext"].pop("agent_hints") == {"priority": 5, "osl": round(mean)}
    assert extended == {**body, "nvext": {"annotations": ["a"]}}


def test_values_of_the_client_keep_their_bytes_and_its_own_hint_stays() -> None:
    text = b'{"model":"m","prompt":"Hi","seed":12345678901234567890123,"top_p":0.10,"nvext":{"agent_hints":{"osl":7}}}'

    async def run():
        async with LengthServer(LengthServerConfig()) as app:
            return await ask(app, "/v1/hints/dynamo", text)

    _, _, answer = asyncio.run(run())
    assert answer["body"]["seed"] == 12345678901234567890123
    assert answer["body"]["nvext"]["agent_hints"] == {"osl": 7}


def test_a_proxy_gets_no_error_for_a_request_without_a_hint() -> None:
    path = "/v1/hints/llm-d/v1/chat/completions"
    posted = [
        (path, chat()),
        (path, b"{"),
        ("/v1/hints/llm-d/v1/embeddings", {}),
        ("/v1/hints/smg/v1/models", None, "GET"),
    ]
    found = answers(*posted)
    assert [status for status, _, _ in found] == [200] * 4
    assert [b"x-llm-d-inference-objective" in headers for _, headers, _ in found] == [True, False, False, False]


REFUSED = [
    ("/v1/lengths", {"model": "m"}, 400, "either messages"),
    ("/v1/lengths", chat(prompt="Hi"), 400, "either messages"),
    ("/v1/lengths", b'{"model": ', 400, "valid JSON"),
    ("/v1/lengths", b'{"prompt":' + b"[" * 100_000, 400, "nested too deeply"),
    ("/v1/lengths", {"prompt": "Hi"}, 400, "model"),
    ("/v1/lengths", chat(max_tokens=0), 400, "max_tokens must be an integer from 1"),
    ("/v1/lengths", chat(lengths={"quantiles": [1.5]}), 400, "quantiles must be at most 100 numbers from 0 to 1"),
    ("/v1/lengths", chat(lengths={"thresholds": [-1]}), 400, "thresholds must be"),
    ("/v1/lengths", chat(lengths={"quantile": [0.5]}), 400, "unknown field `quantile`"),
    ("/v1/lengths", chat(max_tokens=10, lengths={"generated_tokens": 10}), 400, "below max_tokens (10); it is 10"),
    ("/v1/hints/dynamo", chat(nvext=[]), 400, "must be objects"),
    ("/v1/hints/ray", chat(), 404, "known are dynamo, kserve, llm-d, production-stack, smg"),
    ("/v1/lengths/observed", {"id": "none", "output_tokens": 5}, 404, "'none'"),
    ("/v1/lengths/observed", {"id": "none", "output_tokens": 0}, 400, "output_tokens must be from 1"),
    ("/v1/completions", chat(), 404, "Unknown request URL"),
]


def test_a_wrong_request_gets_one_clear_message() -> None:
    found = answers(*((path, body) for path, body, _, _ in REFUSED))
    for (path, body, status, message), (given_status, _, answer) in zip(REFUSED, found, strict=True):
        assert given_status == status, (path, body, answer)
        assert message in answer["error"]["message"]
    (status, headers, _), *_ = answers(("/v1/lengths", None, "GET"))
    assert (status, headers[b"allow"]) == (405, b"POST")


def test_an_output_is_reported_once() -> None:
    async def run():
        async with LengthServer(LengthServerConfig()) as app:
            _, _, answer = await ask(app, "/v1/lengths", chat())
            observed = {"id": answer["id"], "output_tokens": 300, "finish_reason": "length"}
            return [await ask(app, "/v1/lengths/observed", observed) for _ in range(2)]

    (first, _, learned), (second, _, _) = asyncio.run(run())
    assert (first, learned["learned"], learned["observed_outputs"], second) == (200, True, 1, 404)


@asynccontextmanager
async def small_server():
    limits = Limits(body_bytes=4096, body_budget_bytes=8192)
    async with running(LengthServerConfig(limits=limits)) as (_, port):
        yield port


def test_a_service_has_health_and_metrics_and_bounds_bodies() -> None:
    with on_thread(small_server(), "lengths") as port:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

        def send(method, path, body=None):
            client.request(method, path, body, {"content-type": "application/json"})
            answer = client.getresponse()
            return answer.status, answer.read().decode()

        assert send("GET", "/health") == (200, '{"status":"ok"}')
        assert send("GET", "/ready") == (200, '{"status":"ready"}')
        status, text = send("POST", "/v1/lengths", json.dumps(chat(FACT)))
        assert (status, json.loads(text)["bin"]) == (200, "SHORT")
        assert json.loads(send("GET", "/v1/predictor")[1])["kind"] == "lexical"
        status, text = send("GET", "/metrics")
        assert 'lengthwise_length_server_request_seconds_count{path="/v1/lengths",status="200"} 1.0' in text
        assert 'lengthwise_length_server_bins_total{bin="SHORT"} 1.0' in text
        status, text = send("POST", "/v1/lengths", json.dumps(chat("word " * 2000)))
        assert status == 413
        assert "4096 bytes" in text
        client.close()


@pytest.mark.slow
def test_without_its_predictor_the_server_is_not_ready_and_answers_the_prior() -> None:
    async def run():
        async def wait_ready(status):
            while (await ask(app, "/ready", None, "GET"))[0] != status:  # noqa: ASYNC110 - the server has no event for it
                await asyncio.sleep(0.01)

        async with LengthServer(settings(inline_below_s=0.0, deadline_s=60.0)) as app:
            before = await ask(app, "/v1/lengths", chat(FACT))
            os.kill(app.predictor.state()["process"]["pid"], signal.SIGKILL)
            await wait_ready(503)
            prior = await ask(app, "/v1/lengths", chat(FACT))
            await wait_ready(200)
            return before, prior, await ask(app, "/v1/lengths", chat(FACT))

    found = [(status, answer["source"], answer["bin"]) for status, _, answer in asyncio.run(run())]
    assert found == [(200, "predictor", "SHORT"), (200, "prior", "UNKNOWN"), (200, "predictor", "SHORT")]


@pytest.mark.slow
def test_the_command_serves_until_a_signal() -> None:
    command = [sys.executable, "-m", "lengthwise", "predict", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            port = int(re.search(r":(\d+)/v1/lengths, predictor default", process.stdout.readline())[1])
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            client.request("POST", "/v1/lengths", json.dumps(chat()), {"content-type": "application/json"})
            assert json.loads(client.getresponse().read())["source"] == "predictor"
            client.close()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("defualt",), "did you mean: default"),
        (("default", "--statistic", "max"), "max"),
        (("default", "--short-below", "3000"), "1 <= short_below <= long_from; they are 3000 and 2000"),
        (("default", "--bin-confidence", "0.5"), "above 0.5 and at most 1; it is 0.5"),
    ],
)
def test_unusable_settings_are_refused(options, message, capsys) -> None:
    assert main(["predict", "serve", *options]) == 2
    assert message in capsys.readouterr().err
