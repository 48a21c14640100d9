"""Fifty pods of a StatefulSet behind one gateway; fifty_pods.py says what is real."""

from __future__ import annotations

import asyncio
import random

import pytest
from fifty_pods import DATA, NAMESPACE, PODS, recorded, served
from kube_api import KubeApi, endpoint, endpoint_slice
from rendered_manifests import resources

from lengthwise.gateway.config import Engine
from lengthwise.gateway.fleet.discovery import EndpointSlices


@pytest.mark.slow
def test_fifty_pods_that_come_and_go_lose_no_answer_and_keep_their_names(shared):
    answers = recorded(shared(DATA), 80)
    outcome = served(answers, "isrtf")
    assert (outcome.lost, len(outcome.jct_s)) == (0, 80)
    assert outcome.engines == {f"engine-{number}" for number in range(PODS)}
    assert outcome.lists == 1  # all changes came by the watch


def test_the_manifests_let_a_gateway_find_engines_of_its_own_namespace_alone(tmp_path):
    """By the Role and the RoleBinding of the manifests, which the API server enforces."""
    (tmp_path / "token").write_text("of the pod")
    published: dict[str, list[str]] = {NAMESPACE: [], "other": []}

    async def work() -> None:
        async with KubeApi(token="of an administrator") as api:
            for item in resources("base"):
                api.put(item, namespace=NAMESPACE)
            api.accounts["of the pod"] = (NAMESPACE, "gateway")
            for space in published:
                found = endpoint_slice("a", [endpoint("127.0.0.9", pod="engine-0")], service="engine-pods")
                api.put(found, namespace=space)
            at = {"api_url": api.url, "account": tmp_path, "rng": random.Random(1)}
            sources = [EndpointSlices(f"{space}/engine-pods:8000", Engine("http://any"), **at) for space in published]
            tasks = [
                asyncio.create_task(source.run(lambda found, names=names: names.extend(one.name for one in found)))
                for source, names in zip(sources, published.values(), strict=True)
            ]
            async with asyncio.timeout(60):
                while not published[NAMESPACE] or api.lists + api.watches < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert api.lists == 1
            assert api.refused == 0

    asyncio.run(work())
    assert published == {NAMESPACE: ["engine-0"], "other": []}
