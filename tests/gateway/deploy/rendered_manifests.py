"""The manifests as they would be applied."""

from __future__ import annotations

import json
import os
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
import yaml
from own_kustomize import built

FAST = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
OVERLAYS = ("dev", "production", "monitoring", "hpa", "keda", "scale-to-zero")
ALL = ("base", *OVERLAYS)
WITH_VLLM = tuple(name for name in ALL if name != "dev")
GATEWAY = {"app.kubernetes.io/name": "gateway", "app.kubernetes.io/component": "gateway"}
ENGINE = {"app.kubernetes.io/name": "engine", "app.kubernetes.io/component": "engine"}


@cache
def resources(name: str) -> list[dict]:
    """All resources of the base or of an overlay, by our own kustomize; a caller copies one before changing it."""
    return json.loads(json.dumps(built(folder(name)), sort_keys=True))  # fields in kubectl's order


def folder(name: str) -> Path:
    """Where it is."""
    return DEPLOY / ("base" if name == "base" else f"overlays/{name}")


def tool(name: str) -> str:
    """Return kubectl or helm as ``make kubernetes`` has installed it, or skip the test (in CI it fails)."""
    path = ROOT / ".kubernetes" / name / name
    if not path.exists():
        message = f"{name} is not here: make kubernetes"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return str(path)


def output_of(*command: str) -> str:
    """Return what a command prints; it must succeed."""
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def kustomized(name: str) -> list[dict]:
    """The same by kubectl, generated names without their digests."""
    return without_digests(output_of(tool("kubectl"), "kustomize", str(folder(name))))


def without_digests(text: str) -> list[dict]:
    """Return resources, the names of the gateway's ConfigMap without a digest."""
    return list(yaml.load_all(re.sub(r"(?m)^( *(?:- )?name: gateway)-[a-z0-9]{10}$", r"\1", text), FAST))


def the(name: str, kind: str, called: str) -> dict:
    """The one resource of a kind and name."""
    (found,) = [r for r in resources(name) if r["kind"] == kind and r["metadata"]["name"] == called]
    return found


def of_kind(name: str, kind: str) -> list[dict]:
    """All resources of a kind."""
    return [r for r in resources(name) if r["kind"] == kind]


def pod(name: str, kind: str, called: str) -> dict:
    """The pod's spec of a workload."""
    return the(name, kind, called)["spec"]["template"]["spec"]


def gateway(name: str) -> dict:
    """The gateway's pod."""
    return pod(name, "Deployment", "gateway")


def engine(name: str) -> dict:
    """The engine's pod."""
    return pod(name, "StatefulSet", "engine")


def container(one: dict) -> dict:
    """A pod's only container."""
    (found,) = one["containers"]
    return found


def gateway_toml(name: str) -> str:
    """The file that the gateway's pod mounts."""
    (mounted,) = [volume["configMap"]["name"] for volume in gateway(name)["volumes"] if "configMap" in volume]
    return the(name, "ConfigMap", mounted)["data"]["gateway.toml"]


def sleeps_s(one: dict) -> int:
    """Seconds that a container's preStop takes."""
    sleep, seconds = one["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    return int(seconds)
