"""A real vLLM takes what is emitted: every command line, one server, one load test."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # their engine is the one that is tested

from _vllm import PYTHON, QUIET, make_model

from lengthwise import EngineLimits, Poisson, Scheduler, Workload, deploy, preset
from lengthwise.backend import load_test, vllm_launch, write_trace
from lengthwise.backend.process import free_port, local_engine
from lengthwise.policy import known, named

pytestmark = pytest.mark.engine

SCRIPTS = Path(__file__).parent / "engine"


@pytest.fixture(scope="module")
def python():
    """The interpreter of the engine's own environment. A checked change must not pass without it."""
    if not PYTHON.exists():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"no {PYTHON}: make engine")
    return str(PYTHON)


def run(python, script, *words, environment=None, given=None):
    """What a script of tests/backend/engine prints, in the engine's environment."""
    done = subprocess.run(
        [python, str(SCRIPTS / script), *words],
        env={**os.environ, **QUIET, **(environment or {})},
        input=given,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def deployments():
    """Degrees, dtypes, limits and every policy of every axis: what may be emitted."""
    limits = EngineLimits(max_model_len=4096)
    for tp, pp in itertools.product((1, 2, 8), (1, 2)):
        yield deploy("llama-3.1-8b", "H200", tp=tp, pp=pp, limits=limits)
    for weights, cache in itertools.product(
        ("bfloat16", "float32", "fp8", "int8", "int4", "fp4"), (None, "fp8", "int8")
    ):
        given = EngineLimits(max_model_len=4096, weight_dtype=weights, kv_dtype=cache)
        yield deploy("llama-3.1-8b", "H100", limits=given)
    for name in named():
        yield deploy("llama-3.1-8b", "H100", scheduler=name, limits=limits)
    for axis in ("rank", "victim", "batching", "memory"):
        for name in known(axis):
            yield deploy("llama-3.1-8b", "H100", scheduler=Scheduler(**{axis: name}), limits=limits)
    odd = EngineLimits(max_num_seqs=512, max_num_batched_tokens=100, block_size=8, max_model_len=3000, watermark=0.0)
    yield deploy("llama-3.1-8b", "H100", num_blocks=999, limits=odd)


def load_tests():
    d = deploy("llama-3.1-8b", "H100", limits=EngineLimits(max_model_len=4096))
    open_loop = preset("chat-1m").generate(20, Poisson(4.0), seed=0)
    closed = Workload(np.zeros(5), np.full(5, 10), np.full(5, 20), concurrency=3)
    return [load_test(d, w, trace="trace.jsonl", rate_rps=4.0).command for w in (open_loop, closed)]


REMOVED = (("--swap-space", "4"), ("--block-size", "-1"), ("--quantization", "fp7"))


@pytest.fixture(scope="module")
def answers(python):
    """What vLLM's own parsers say to all command lines, by command line; they load once."""
    launches = [vllm_launch(d, device=device) for d in deployments() for device in ("cuda", "cpu")]
    plain = vllm_launch(deploy("llama-3.1-8b", "H100")).command
    commands = [launch.command for launch in launches] + load_tests() + [plain + words for words in REMOVED]
    text = run(python, "parse.py", given=json.dumps(commands))
    return dict(zip(commands, json.loads(text.partition("ANSWERS")[2]), strict=True))


def test_vllms_own_parser_takes_every_launch(answers):
    made = [(d, vllm_launch(d, device=device)) for d in deployments() for device in ("cuda", "cpu")]
    refused = {" ".join(la.command): a["error"] for _, la in made if "error" in (a := answers[la.command])}
    assert refused == {}
    for d, launch in made:
        taken = answers[launch.command]["taken"]
        assert taken["tensor_parallel_size"] == d.parallel.tp
        assert taken["pipeline_parallel_size"] == d.parallel.pp
        assert taken["max_model_len"] == d.max_model_len
        assert taken["enable_prefix_caching"] is False


def test_vllms_own_parser_takes_every_load_test(answers):
    taken = [answers[command] for command in load_tests()]
    assert [a.get("error") for a in taken] == [None, None]
    assert taken[1]["taken"]["max_concurrency"] == 3


@pytest.mark.parametrize("words", REMOVED)
def test_a_flag_that_vllm_does_not_take_would_be_seen(answers, words):
    """What the two tests above are worth."""
    assert "error" in answers[vllm_launch(deploy("llama-3.1-8b", "H100")).command + words]


@pytest.fixture(scope="module")
def served(python, tmp_path_factory):
    """A deployment of a tiny model and the port at which a real vLLM serves it."""
    folder = tmp_path_factory.mktemp("engine")
    model = make_model(folder / "tiny", "tiny")
    limits = EngineLimits(max_num_seqs=8, max_num_batched_tokens=128, max_model_len=256, block_size=16)
    d = deploy(str(model / "config.json"), "L4", num_blocks=64, limits=limits)
    port = free_port()
    launch = vllm_launch(d, port=port, device="cpu")
    assert launch.command[:3] == ("vllm", "serve", str(model))
    module = (python, "-m", "vllm.entrypoints.openai.api_server", "--model")  # no console script there
    env = QUIET | launch.environment | {"VLLM_CACHE_ROOT": str(folder / "cache")}
    with local_engine([*module, *launch.command[2:]], port=port, env=env, log_path=folder / "log"):
        yield d, port


def fetch(port, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return reply.read().decode()


def test_a_real_server_serves_under_the_simulated_limits(served):
    d, port = served
    body = {"model": d.model.name, "prompt": [5] * 20, "max_tokens": 12, "ignore_eos": True}
    answer = json.loads(fetch(port, "/v1/completions", body))
    assert answer["usage"]["prompt_tokens"] == 20
    assert answer["usage"]["completion_tokens"] == 12
    (model,) = json.loads(fetch(port, "/v1/models"))["data"]
    assert model["max_model_len"] == d.max_model_len
    (cache,) = [line for line in fetch(port, "/metrics").splitlines() if line.startswith("vllm:cache_config_info{")]
    assert 'enable_prefix_caching="False"' in cache
    assert 'block_size="32"' in cache  # of a CPU
    assert 'num_gpu_blocks="33"' in cache  # as many tokens as 64 blocks of 16, and the null block


def test_the_load_test_sends_the_simulated_requests(python, served, tmp_path):
    """To the token: vLLM's client counts what it sent and what came back."""
    d, port = served
    rng = np.random.default_rng(0)
    workload = Workload(
        np.sort(rng.uniform(0, 2, 12)), rng.integers(1, 150, 12), rng.integers(1, 60, 12), name="twelve"
    )
    write_trace(tmp_path / "trace.jsonl", workload)
    url = f"http://127.0.0.1:{port}"
    launch = load_test(d, workload, trace=str(tmp_path / "trace.jsonl"), rate_rps=6.0, base_url=url)
    words = [*launch.command[3:], "--result-dir", str(tmp_path)]
    message = run(python, "bench.py", *words, environment=launch.environment)
    measured = json.loads((tmp_path / "measured.json").read_text())
    assert measured["completed"] == 12, message
    assert measured["failed"] == 0
    assert measured["total_input_tokens"] == workload.prompt_tokens.sum()
    assert measured["total_output_tokens"] == workload.output_tokens.sum()
    assert measured["simulated_rate_rps"] == "6"
