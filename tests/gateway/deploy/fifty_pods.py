"""A gateway with fifty engines that Kubernetes runs, in virtual time: the table of deploy/README.md.

The gateway, its discovery by EndpointSlices, its default predictor and all HTTP between client, gateway and engines are
real. Emulated are time (computing takes none), the engines (MAX_NUM_SEQS sequences, STEPS), the API server, and the
StatefulSet's controller and kubelet. Prompts and answer lengths are recorded: AlpacaEval's prompts with the answers of
Vicuna 13B (non-commercial: for evaluation only), as many tokens as they have. Pods come and go meanwhile: five leave by
a scale-down and come back, one is deleted, and one dies and is restarted.

    python tests/gateway/deploy/fifty_pods.py SHARED
"""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

# ruff: noqa: E402
from kube_api import Json, KubeApi
from kube_nodes import Cluster
from rendered_manifests import resources

from lengthwise import predict
from lengthwise.apps.launch.simulated import run_virtually
from lengthwise.engine.continuous_batching import Limits
from lengthwise.gateway.config import (
    Discovery,
    Engine,
    GatewayConfig,
    Listen,
    Order,
    PredictionConfig,
    ResilienceConfig,
)
from lengthwise.gateway.length_prediction import LengthPredictor
from lengthwise.gateway.serve import Gateway
from lengthwise.testing.engine_server import EngineServer, EngineSpec, LinearSteps

PODS, MAX_NUM_SEQS, MODEL, NAMESPACE = 50, 2, "llama-3.1-8b", "lengthwise"
STEPS = LinearSteps(0.018, 0.0005, 0.0001)  # about 50 tokens/s of a stream, 10,000 prompt tokens/s
LOAD, SHAPE = 3.0, 0.73  # times what fifty engines serve, until all have arrived; Gamma's shape, as in ELIS
DATA = "data/text/nc_alpaca_eval"


class Answers(NamedTuple):
    """Recorded prompts and tokens of their answers."""

    prompts: list[str]
    tokens: list[int]


class Outcome(NamedTuple):
    """What clients and the API server saw."""

    jct_s: np.ndarray
    lost: int
    engines: set[str]  # up at the end
    preemptions: int
    lists: int


def recorded(folder: Path, count: int, seed: int = 0) -> Answers:
    """Return some of the recorded prompts in random order."""

    def rows(name: str) -> list[Json]:
        with gzip.open(folder / name, "rt", encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    outputs = {row["idx"]: row["n_tok_tekken131k"] for row in rows("outputs/vicuna-13b-v1.3.jsonl.gz")}
    usable = [row for row in rows("instructions.jsonl.gz") if outputs.get(row["idx"], 0) > 0]
    chosen = [usable[i] for i in np.random.default_rng(seed).permutation(len(usable))[:count]]
    return Answers([row["instruction"] for row in chosen], [outputs[row["idx"]] for row in chosen])


class Pod:
    """A container of an emulated engine."""

    def __init__(self, server: EngineServer) -> None:
        self.server = server

    async def terminate(self) -> None:
        """Let requests finish, as vLLM does with --shutdown-timeout."""
        await self.server.idle(within_s=600.0)
        await self.server.die()

    def kill(self) -> None:
        """End at once."""
        if self.server.up:
            self.server.die_soon()


def served(answers: Answers, mode: str, *, disturbed: bool = True) -> Outcome:
    """Serve the prompts once, in an order of the gateway, in virtual time."""
    return run_virtually(_served(answers, mode, disturbed=disturbed))


async def _served(answers: Answers, mode: str, *, disturbed: bool) -> Outcome:
    running: dict[str, Pod] = {}

    async def start(pod: Json, address: str) -> Pod:
        limits = Limits(max_num_seqs=MAX_NUM_SEQS)
        server = EngineServer(EngineSpec(MODEL, limits=limits, steps=STEPS), host=address, port=8000)
        running[pod["metadata"]["name"]] = made = Pod(await server.__aenter__())
        return made

    discovery = {"endpoint_slices": f"{NAMESPACE}/engine-pods:8000"}
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(KubeApi())
        cluster = await stack.enter_async_context(Cluster(api, start))
        for item in resources("dev"):
            if item["kind"] != "Deployment":
                api.put(item, namespace=NAMESPACE)
        scale(api, PODS)
        await cluster.until(lambda: len(cluster.ready("engine-")) == PODS)
        config = GatewayConfig(
            discovery=Discovery(
                **discovery,
                api_url=api.url,
                engine=Engine("http://any", concurrency=MAX_NUM_SEQS, generation_defaults="none"),
            ),
            order=Order(mode, max_wait_s=math.inf),
            prediction=PredictionConfig(learn=False),
            resilience=ResilienceConfig(health_every_s=15.0),
            listen=Listen(port=0, admin_port=None),
        )
        clock = asyncio.get_running_loop().time
        gateway = await stack.enter_async_context(Gateway(config, clock=clock, make_predictor=_predictor))

        def up() -> set[str]:
            return {one.name for one in gateway.driver.statistics().workers if one.up}

        await cluster.until(lambda: len(up()) == PODS)
        changes = asyncio.ensure_future(_changes(api, cluster, running)) if disturbed else None
        jct_s, lost = await _posted(f"http://127.0.0.1:{gateway.port}", answers)
        if changes is not None:
            await changes
        await cluster.until(lambda: len(up()) == PODS)
        preemptions = gateway.driver.statistics().preemptions
        return Outcome(np.array(jct_s), lost, up(), preemptions, api.lists)


def _predictor(config: PredictionConfig, clock: Any, late: Any) -> LengthPredictor:
    return LengthPredictor(config, clock, late, predictor=predict.default(), place="inline")  # computing takes no time


def scale(api: KubeApi, pods: int) -> None:
    """Set the number of replicas of the engines' StatefulSet."""
    item: Any = api.get("StatefulSet", "engine", NAMESPACE)
    api.put({**item, "spec": item["spec"] | {"replicas": pods}}, namespace=NAMESPACE)


async def _changes(api: KubeApi, cluster: Cluster, running: dict[str, Pod]) -> None:
    await asyncio.sleep(3.0)
    scale(api, PODS - 5)
    cluster.end_pod("engine-0")
    await asyncio.sleep(2.0)
    died = running["engine-7"].server
    await died.die()
    await asyncio.sleep(5.0)
    await died.restart()
    await cluster.until(lambda: len(cluster.ready("engine-")) == PODS - 5)
    scale(api, PODS)
    await cluster.until(lambda: len(cluster.ready("engine-")) == PODS, 600.0)


async def _posted(url: str, answers: Answers) -> tuple[list[float], int]:
    """Send all prompts in an open loop; return the JCT of each and the number of wrong or failed answers."""
    loop, rng = asyncio.get_running_loop(), np.random.default_rng(1)
    mean_s = float(np.mean(answers.tokens)) * (STEPS.fixed_s + MAX_NUM_SEQS * STEPS.decode_s)
    gaps_s = rng.gamma(SHAPE, mean_s / (PODS * MAX_NUM_SEQS * LOAD) / SHAPE, len(answers.tokens))
    start_s, lost = loop.time(), 0
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    ) as session:

        async def post(prompt: str, tokens: int, due_s: float) -> float:
            nonlocal lost
            await asyncio.sleep(start_s + due_s - loop.time())
            forced = {"output_tokens": tokens, "max_tokens": 2048}
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 2048, "vllm_xargs": forced}
            async with session.post(f"{url}/v1/completions", json=body) as response:
                found = json.loads(await response.read())
            lost += response.status != 200 or found["usage"]["completion_tokens"] != tokens
            return loop.time() - start_s - due_s

        return await asyncio.gather(*map(post, *answers, np.cumsum(gaps_s).tolist())), lost


def rows(folder: Path, count: int = 600) -> list[str]:
    """Return the rows of the table."""
    answers, found = recorded(folder, count), []
    for mode in ("fcfs", "isrtf"):
        for disturbed in (False, True):
            outcome = served(answers, mode, disturbed=disturbed)
            mean_s, p99_s = outcome.jct_s.mean(), np.quantile(outcome.jct_s, 0.99)
            pods = "come and go" if disturbed else "stay"
            found.append(f"| {mode} | {pods} | {mean_s:.1f} s | {p99_s:.0f} s | {outcome.lost} of {count} |")
    return found


if __name__ == "__main__":
    sys.stdout.write("\n".join(rows(Path(sys.argv[1]) / DATA)) + "\n")
