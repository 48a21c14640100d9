"""Controllers, a kubelet and Service proxies for the emulated API server, in its event loop.

Workloads of the server become Pods, each at an address of its own in 127.0.0.0/8, and Services become EndpointSlices.
``start`` runs a Pod's container. Covered: a StatefulSet's stable names, scaling from the highest ordinal; a
Deployment's rolling update by maxSurge and maxUnavailable; readiness probes; preStop, SIGTERM, and the grace period at
a Pod's end; connections that a Service spreads over ready Pods, and that stay where they are. Not covered: scheduling,
resources, startup and liveness probes, a StatefulSet's update of its template, NetworkPolicies.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import itertools
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import aiohttp
from kube_api import Json, KubeApi

LAG_S = 0.2
"""From a Pod's change to the Service proxies, which real clusters take up to seconds for."""


class Container(Protocol):
    """What runs in a Pod."""

    async def terminate(self) -> None:
        """Send SIGTERM and wait for the end."""

    def kill(self) -> None:
        """Send SIGKILL."""


Start = Callable[[Json, str], Awaitable[Container]]


@dataclass(eq=False)
class _Pod:
    name: str
    namespace: str
    address: str
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    is_ready: bool = False
    is_terminating: bool = False


class Cluster:
    """Runs the Pods of an API server's workloads; an async context manager."""

    def __init__(self, api: KubeApi, start: Start) -> None:
        self.api, self._start = api, start
        self._pods: dict[str, _Pod] = {}
        self._numbers, self._changed = itertools.count(1), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        pid = os.getpid()
        self._network = f"127.{100 + pid // 250 % 150}.{1 + pid % 250}"
        self.killed = 0

    async def __aenter__(self) -> Self:
        """Run the Pods, and follow all changes."""
        self._session = aiohttp.ClientSession()
        self.api.on_change = lambda *_: self._changed.set()
        self._changed.set()
        self._run(self._reconcile())
        return self

    async def __aexit__(self, *_: object) -> None:
        """End all Pods at once."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    def _run(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def ready(self, prefix: str) -> list[str]:
        """Return the names of the ready Pods whose names begin so."""
        return sorted(pod.name for pod in self._pods.values() if pod.is_ready and pod.name.startswith(prefix))

    async def until(self, true: Callable[[], bool], within_s: float = 120.0) -> None:
        """Wait for a state of the cluster."""
        async with asyncio.timeout(within_s):
            while not true():  # noqa: ASYNC110 - what is awaited has no event
                await asyncio.sleep(0.02)

    def end_pod(self, name: str) -> None:
        """Delete a Pod; its controller makes another one."""
        pod = self._pods[name]
        pod.is_terminating = True
        pod.finished.set()
        self._publish(pod)

    # Controllers
    async def _reconcile(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            for item in self.api.items("StatefulSet"):
                self._reconcile_stateful(item)
            for item in self.api.items("Deployment"):
                self._reconcile_deployment(item)
            for item in self.api.items("Service"):
                self._reconcile_service(item)

    def _of(self, item: Json) -> list[_Pod]:
        prefix, namespace = f"{item['metadata']['name']}-", item["metadata"]["namespace"]
        return [pod for pod in self._pods.values() if pod.name.startswith(prefix) and pod.namespace == namespace]

    def _reconcile_stateful(self, item: Json) -> None:
        wanted = {f"{item['metadata']['name']}-{k}": k for k in range(item["spec"].get("replicas", 1))}
        present = {pod.name: pod for pod in self._of(item)}
        for name in wanted.keys() - present.keys():
            labels = {"statefulset.kubernetes.io/pod-name": name, "apps.kubernetes.io/pod-index": str(wanted[name])}
            self._create(item, name, labels, {"hostname": name, "subdomain": item["spec"]["serviceName"]})
        for name in present.keys() - wanted.keys():
            if not present[name].is_terminating:
                self.end_pod(name)

    def _reconcile_deployment(self, item: Json) -> None:
        spec, update = item["spec"], item["spec"]["strategy"]["rollingUpdate"]
        digest = hashlib.sha256(json.dumps(spec["template"], sort_keys=True).encode()).hexdigest()[:8]
        prefix, replicas = f"{item['metadata']['name']}-{digest}-", spec.get("replicas", 1)
        pods = [pod for pod in self._of(item) if not pod.is_terminating]
        new, old = ([p for p in pods if p.name.startswith(prefix)], [p for p in pods if not p.name.startswith(prefix)])
        for _ in range(min(replicas - len(new), replicas + update["maxSurge"] - len(pods))):
            self._create(item, f"{prefix}{next(self._numbers)}", {"pod-template-hash": digest}, {})
        spare = sum(pod.is_ready for pod in pods) - (replicas - update["maxUnavailable"])
        for pod in sorted(old, key=lambda pod: pod.is_ready)[: max(0, spare)]:
            self.end_pod(pod.name)

    def _create(self, owner: Json, name: str, labels: Json, more: Json) -> None:
        pod = self._pods[name] = _Pod(
            name, owner["metadata"]["namespace"], f"{self._network}.{1 + next(self._numbers) % 250}"
        )
        template = copy.deepcopy(owner["spec"]["template"])
        metadata = {"name": name, "labels": template["metadata"]["labels"] | labels}
        item = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"] | more}
        self.api.put(item, namespace=pod.namespace)
        self._run(self._run_pod(pod, item))

    def _reconcile_service(self, item: Json) -> None:
        meta, selector = item["metadata"], item["spec"].get("selector", {})
        rows, ports = [], []
        for pod in self.api.items("Pod", meta["namespace"]):
            status = pod.get("status")
            if status and selector.items() <= pod["metadata"]["labels"].items():
                rows.append(_endpoint(pod, status))
                containers = pod["spec"]["containers"]
                named = {one["name"]: one["containerPort"] for c in containers for one in c.get("ports", ())}
                ports = [
                    {"name": one["name"], "port": named[one["targetPort"]], "protocol": "TCP"}
                    for one in item["spec"]["ports"]
                ]
        new = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": meta["name"], "labels": {"kubernetes.io/service-name": meta["name"]}},
            "addressType": "IPv4",
            "ports": ports,
            "endpoints": rows,
        }
        old = self.api.get("EndpointSlice", meta["name"], meta["namespace"])
        if old is None or (old["endpoints"], old["ports"]) != (rows, ports):
            self.api.put(new, namespace=meta["namespace"])

    # Kubelet
    async def _run_pod(self, pod: _Pod, item: Json) -> None:
        container = await self._start(item, pod.address)
        own = item["spec"]["containers"][0]
        probe = asyncio.ensure_future(self._probe(pod, own))
        try:
            await pod.finished.wait()
            grace_s = item["spec"].get("terminationGracePeriodSeconds", 30)
            try:
                async with asyncio.timeout(grace_s):
                    before = own.get("lifecycle", {}).get("preStop")
                    await asyncio.sleep(int(before["exec"]["command"][1]) if before else 0)
                    await container.terminate()
            except TimeoutError:
                self.killed += 1
        finally:
            probe.cancel()
            container.kill()
        del self._pods[pod.name]
        self.api.delete(pod.name, namespace=pod.namespace, kind="Pod")
        await asyncio.gather(probe, return_exceptions=True)

    async def _probe(self, pod: _Pod, container: Json) -> None:
        probe = container["readinessProbe"]
        ports = {one["name"]: one["containerPort"] for one in container["ports"]}
        url = f"http://{pod.address}:{ports[probe['httpGet']['port']]}{probe['httpGet']['path']}"
        failures = 0
        while True:
            is_good = False
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=10.0)) as response:
                    is_good = response.status == 200
            failures = 0 if is_good else failures + 1
            if is_good != pod.is_ready and (is_good or failures >= probe.get("failureThreshold", 3)):
                pod.is_ready = is_good
                self._publish(pod)
            # A pod that comes is probed more often than by the period, as a startup probe would do it.
            await asyncio.sleep(probe["periodSeconds"] if pod.is_ready else 0.1)

    def _publish(self, pod: _Pod) -> None:
        item = self.api.get("Pod", pod.name, pod.namespace)
        if item is not None:
            status = {"podIP": pod.address, "ready": pod.is_ready, "terminating": pod.is_terminating}
            self.api.put({**item, "status": status}, namespace=pod.namespace)


def _endpoint(pod: Json, status: Json) -> Json:
    is_ready, is_terminating = status["ready"], status["terminating"]
    conditions = {"ready": is_ready and not is_terminating, "serving": is_ready, "terminating": is_terminating}
    target = {"kind": "Pod", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
    return {"addresses": [status["podIP"]], "conditions": conditions, "targetRef": target}


class ServiceProxy:
    """A Service's address: spreads connections over its ready Pods in turn; an async context manager.

    It learns of changes LAG_S late, and leaves open connections where they are.
    """

    def __init__(self, api: KubeApi, name: str, namespace: str) -> None:
        self._api, self._name, self._namespace = api, name, namespace
        self._places: list[tuple[str, int]] = []
        self._turns = itertools.count()
        self.refused = 0

    async def __aenter__(self) -> Self:
        """Listen, and follow the EndpointSlice."""
        self._following = asyncio.ensure_future(self._follow())
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening."""
        self._server.close()
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)

    def places(self) -> list[tuple[str, int]]:
        """Return where new connections go."""
        return self._places

    async def _follow(self) -> None:
        while True:
            item = self._api.get("EndpointSlice", self._name, self._namespace)
            rows = item["endpoints"] if item else []
            ready = [row["addresses"][0] for row in rows if row["conditions"]["ready"]]
            await asyncio.sleep(LAG_S)
            self._places = [(address, item["ports"][0]["port"]) for address in ready] if item else []

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._places:
            self.refused += 1
            writer.transport.abort()
            return
        try:
            place = self._places[next(self._turns) % len(self._places)]
            inner_reader, inner_writer = await asyncio.open_connection(*place)
        except OSError:
            self.refused += 1
            writer.transport.abort()
            return
        await asyncio.gather(_pump(reader, inner_writer), _pump(inner_reader, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()
