"""A schedule of phases in front of a real, unmodified vLLM: its streams show them, and no request is lost."""

from __future__ import annotations

import asyncio
import json
import statistics

import pytest

from lengthwise.backend.openai_protocol import Server
from lengthwise.cli import main
from lengthwise.gateway.concurrency_probe import probe_max_num_seqs
from lengthwise.gateway.config import Dispatch, Engine, GatewayConfig, Listen, Order, Phases, PredictionConfig
from lengthwise.gateway.protocols import Listener
from lengthwise.gateway.serve import background_gateway

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SLOTS, PREFILL_BATCH, DECODE_STEPS = 24, 3, 8


@pytest.fixture(scope="module")
def url(tmp_path_factory, engine_python, tiny):
    from plugin_engines import vllm

    folder = tmp_path_factory.mktemp("phases")
    with vllm(engine_python, tiny, folder / "log", "--max-num-seqs", str(SLOTS)) as engine:
        yield engine.url


class Received(Listener):
    def __init__(self):
        self.phases = []

    def phase(self, phase):
        self.phases.append(phase)


async def requested(port, clients, lengths):
    """Output tokens of each, in a closed loop of so many clients."""
    import aiohttp

    left, got = iter(lengths), []
    endpoint = f"http://127.0.0.1:{port}/v1/completions"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def client():
            for tokens in left:
                body = {"model": "m", "prompt": "the sea " * 8, "max_tokens": tokens, "stream": True}
                body |= {"ignore_eos": True, "min_tokens": tokens, "stream_options": {"include_usage": True}}
                async with session.post(endpoint, json=body) as reported:
                    lines = (await reported.text()).splitlines()
                usage = [json.loads(line[6:]).get("usage") for line in lines if line.startswith("data: {")]
                got.append((tokens, usage[-1]["completion_tokens"]))

        await asyncio.gather(*(client() for _ in range(clients)))
    return got


def test_phases_before_an_unmodified_engine_are_those_of_the_schedule(url):
    received = Received()
    config = GatewayConfig(
        engines=(Engine(url, name="engine"),),
        order=Order("rra", max_wait_s=float("inf")),
        dispatch=Dispatch(phases=Phases(PREFILL_BATCH, DECODE_STEPS, max_requests=SLOTS)),
        prediction=PredictionConfig(predictor="none", learn=False),
        listen=Listen(port=0, admin_port=None),
    )
    with background_gateway(config, (received,), start_timeout_s=60.0) as running:
        lengths = [10 + 7 * (n % 5) for n in range(90)]
        got = asyncio.run(requested(running.gateway.port, 30, lengths))
        assert running.call(running.gateway.drain())
    assert len(got) == 90
    assert all(wanted == came for wanted, came in got)
    retained = [one for one in received.phases if one.cause == "steps"][2:20]
    assert {one.prefill_batch for one in retained} == {PREFILL_BATCH}
    assert statistics.median(one.decode_steps for one in retained) in (DECODE_STEPS, DECODE_STEPS + 0.5)
    assert all(one.decode_steps >= DECODE_STEPS for one in retained)
    assert max(one.decode_batch for one in retained) <= SLOTS


def test_vllm_slots_are_found_by_probing(url):
    assert probe_max_num_seqs(Server(url), 2 * SLOTS) == pytest.approx(SLOTS, abs=2)
    assert probe_max_num_seqs(Server(url), SLOTS - 4) == SLOTS - 4


def test_the_command_follows_a_schedule_and_reports_the_outcome(url, tmp_path, capsys):
    scenario = tmp_path / "short.toml"
    scenario.write_text(
        """
[workload]
prompt = { kind = "uniform", low = 10, high = 60 }
output = { kind = "uniform", low = 2, high = 24 }
num_requests = 90
request_rate = 1
[deployment]
model = "opt-13b"
gpu = "A40"
node = "pcie4-4"
"""
    )
    numbers = dict.fromkeys(("throughput_rps", "latency_s", "latency_high_s", "cycle_s", "prefill_s", "decode_s"), 1.0)
    chosen = {
        "strategy": "rra", "prefill_batch": 4, "decode_steps": 10, "micro_batches": 1, "tp": 1, "tp_groups": 0,
        "prefill_gpus": 1, "decode_batch": 8.0, "memory_share": 0.5, **numbers,
    }  # fmt: skip
    plan = tmp_path / "plan.json"
    plan.write_text(
        json.dumps(
            {"format": "lengthwise.schedule", "version": 1, "chosen": chosen, "bound_s": 60.0, "quantile_tokens": 22}
        )
    )
    words = ["schedule", "run", str(scenario), "--engine", url, "--schedule", str(plan), "--out", str(tmp_path / "run")]
    assert main(words) == 0, capsys.readouterr().err
    assert "The bound of 60 s held" in capsys.readouterr().out
    reported = json.loads((tmp_path / "run" / "outcome.json").read_text())
    seen = {one["name"]: one["value"] for one in reported["outcome"]["seen"]}
    assert seen["prefill batch, B_E"] == pytest.approx(4, abs=0.3)
    phases = [json.loads(line) for line in (tmp_path / "run" / "phases.jsonl").read_text().splitlines()]
    complete = [one["decode_steps"] for one in phases if one["cause"] == "steps"]
    assert min(complete) == statistics.median_low(complete) == 10, "a busy machine makes some longer, none shorter"
