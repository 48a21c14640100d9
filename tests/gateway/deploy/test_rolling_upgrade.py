"""An upgrade of the gateway, and engines that come and go, by the manifests' own settings and without a lost request.

The gateways are real processes, kubectl is real; API server, controllers, kubelet, Service and engines are emulated.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

import aiohttp
import pytest
import yaml
from kube_api import KubeApi
from kube_nodes import Cluster, ServiceProxy
from rendered_manifests import folder, tool

from lengthwise.engine.continuous_batching import Limits
from lengthwise.testing.engine_server import EngineServer, EngineSpec, LinearSteps

NAMESPACE, MODEL = "lengthwise", "llama-3.1-8b"
LINGER_S = 3.0
"""Instead of 10 s, as the emulated Service follows within 0.2 s."""


class Gateway:
    """A container of the manifests' gateway, as a process."""

    def __init__(self, command: list[str], log: Path) -> None:
        with log.open("wb") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=file)

    async def terminate(self) -> None:
        self._process.terminate()
        assert await asyncio.to_thread(self._process.wait) == 0

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Engine:
    """A container of an emulated engine; SIGTERM lets requests finish, as vLLM's --shutdown-timeout does."""

    def __init__(self, server: EngineServer) -> None:
        self.server = server

    async def terminate(self) -> None:
        await self.server.idle(within_s=120.0)
        await self.server.die()

    def kill(self) -> None:
        if self.server.up:
            self.server.die_soon()


def started_in(folder: Path, api: KubeApi):
    """Return the function that starts a pod of the overlay dev."""

    async def start(pod, address):
        container = pod["spec"]["containers"][0]
        if container["name"] == "vllm":
            words = container["args"]
            seqs = int(words[words.index("--max-num-seqs") + 1])
            steps = LinearSteps(0.01, 0.0002, 0.0)
            spec = EngineSpec(words[words.index("--model") + 1], limits=Limits(max_num_seqs=seqs), steps=steps)
            port = int(words[words.index("--port") + 1])
            return Engine(await EngineServer(spec, host=address, port=port).__aenter__())
        (volume,) = [one for one in pod["spec"]["volumes"] if one["name"] == "config"]
        text = api.get("ConfigMap", volume["configMap"]["name"], NAMESPACE)["data"]["gateway.toml"]
        file = folder / f"{pod['metadata']['name']}.toml"
        file.write_text(text.replace("linger_s = 10", f"linger_s = {LINGER_S}").replace("0.0.0.0", address))
        words = [word.replace("$(POD_NAMESPACE)", NAMESPACE) for word in container["args"][1:]]
        words += ["--set", f"discovery.api_url={api.url}"]
        command = [sys.executable, "-m", "lengthwise", "serve", str(file), *words]
        return Gateway(command, file.with_suffix(".log"))

    return start


async def kubectl(api: KubeApi, *words: str) -> None:
    process = await asyncio.create_subprocess_exec(
        tool("kubectl"), "--server", api.url, *words, stdout=-3, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    assert process.returncode == 0, errors


class Clients:
    """Clients with connections that stay open, each sending streamed requests one after the other until ``stop``."""

    def __init__(self, url: str) -> None:
        self._url, self.stopping, self.served, self.failures = url, False, 0, []
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))

    async def run(self, number: int) -> None:
        rng = random.Random(number)
        while not self.stopping:
            tokens = rng.choice([5, 20, 60, 250])
            body = {"model": MODEL, "prompt": f"{number} {tokens}", "stream": True, "ignore_eos": True}
            body |= {"max_tokens": tokens, "stream_options": {"include_usage": True}}
            try:
                async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
                    content = await response.read()
                    usage = json.loads(content.split(b"\n\n")[-3].removeprefix(b"data: "))["usage"]
                    assert (response.status, usage["completion_tokens"]) == (200, tokens)
                self.served += 1
            except (aiohttp.ClientError, OSError, AssertionError, ValueError, IndexError) as error:
                self.failures.append((number, tokens, repr(error)))
            await asyncio.sleep(rng.uniform(0.0, 0.1))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()


async def upgrade(api: KubeApi, folder: Path) -> None:
    """Apply one field of the gateway's pods, as a release would change the image."""
    template = {"metadata": {"annotations": {"release": "2"}}}
    item = {"apiVersion": "apps/v1", "kind": "Deployment", "spec": {"template": template}}
    item["metadata"] = {"name": "gateway", "namespace": NAMESPACE}
    (folder / "release.yaml").write_text(yaml.safe_dump(item))
    await kubectl(api, "apply", "--server-side", "--field-manager=release", "-f", str(folder / "release.yaml"))


async def scale(api: KubeApi, engines: int) -> None:
    await kubectl(api, "--namespace", NAMESPACE, "scale", "statefulset/engine", f"--replicas={engines}")


@pytest.mark.slow
def test_an_upgrade_of_the_gateway_and_of_the_number_of_engines_fails_no_request(tmp_path):
    def pods(api: KubeApi) -> set[str]:
        return {one["metadata"]["name"] for one in api.items("Pod", NAMESPACE)}

    async def work() -> None:
        async with AsyncExitStack() as stack:
            api = await stack.enter_async_context(KubeApi())
            await kubectl(api, "apply", "--server-side", "-k", str(folder("dev")))
            cluster = await stack.enter_async_context(Cluster(api, started_in(tmp_path, api)))
            service = await stack.enter_async_context(ServiceProxy(api, "gateway", NAMESPACE))
            await cluster.until(lambda: len(cluster.ready("gateway")) == 1 and service.places())
            assert cluster.ready("engine") == ["engine-0", "engine-1"]
            clients = await stack.enter_async_context(Clients(service.url))
            running = [asyncio.ensure_future(clients.run(number)) for number in range(12)]
            (first,) = cluster.ready("gateway")
            await cluster.until(lambda: clients.served >= 12)
            await scale(api, 4)
            await upgrade(api, tmp_path)
            await cluster.until(lambda: first not in pods(api) and len(cluster.ready("engine")) == 4)
            await scale(api, 1)
            await cluster.until(lambda: {name for name in pods(api) if name.startswith("engine")} == {"engine-0"})
            clients.stopping = True
            await asyncio.gather(*running)
            assert clients.failures == []
            assert (service.refused, cluster.killed) == (0, 0)

    asyncio.run(work())
