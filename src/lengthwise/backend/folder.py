"""A launch folder: all that one needs to run a simulated deployment and to check the claim."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lengthwise.backend._readme import readme
from lengthwise.backend._scripts import first_port, load_test_script, router_script, server_script
from lengthwise.backend.kubernetes import asks_nvidia, kubernetes_manifest
from lengthwise.backend.launch import PLACEHOLDER, fits_node
from lengthwise.backend.load_test import load_test, write_trace
from lengthwise.backend.sglang import sglang_launch
from lengthwise.backend.vllm import vllm_launch
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import OutputError
from lengthwise.schema.files import write_whole
from lengthwise.schema.workload import Workload

TRACE = "trace.jsonl"


def write_launch(
    folder: Path,
    deployment: Deployment,
    *,
    name: str,
    scenario_text: str,
    workload: Workload,
    rate_rps: float,
    claim: str,
) -> list[Path]:
    """The files of a launch folder, which is made if it is absent; the same input, the same bytes.

    Scripts for vLLM and SGLang, a router before several replicas, Kubernetes resources where a pod can
    hold a replica, a load test with its trace, the scenario, and a README that says what to run.

    Args:
        folder: Where the files shall stand; its parent must exist.
        deployment: What was chosen.
        name: Of the configuration, for headings and for Kubernetes.
        scenario_text: The scenario, kept as it is.
        workload: The requests as they were simulated, at ``rate_rps``.
        rate_rps: Requests a second that the claim is about.
        claim: What the simulation says of it, in a sentence.

    Raises:
        OutputError: A file cannot be written.
    """
    texts = _texts(deployment, name, scenario_text, workload, rate_rps, claim)
    _make(folder)
    for file, text in texts.items():
        write_whole(folder / file, text.encode())
        (folder / file).chmod(0o755 if file.endswith(".sh") else 0o644)
    write_trace(folder / TRACE, workload)
    return [folder / file for file in (*texts, TRACE)]


def _texts(
    deployment: Deployment, name: str, scenario_text: str, workload: Workload, rate_rps: float, claim: str
) -> dict[str, str]:
    texts = {"README.md": "", **_servers(deployment, name), "scenario.toml": scenario_text}
    if deployment.parallel.replicas > 1:
        texts["router.sh"] = router_script(deployment)
    manifest = _manifest(deployment, name)
    if manifest:
        texts["kubernetes.yaml"] = manifest
    sent = load_test(deployment, workload, trace=TRACE, rate_rps=rate_rps)
    texts["load-test.sh"] = load_test_script(sent, _model(vllm_launch(deployment).command))
    texts["README.md"] = readme(deployment, name, claim, sent, manifest=bool(manifest))
    return texts


def _servers(deployment: Deployment, name: str) -> dict[str, str]:
    asked: Any = {
        "port": first_port(deployment),
        "device": "cpu" if deployment.gpu.name.startswith("CPU") else "cuda",
    }
    launches = {
        "vllm.sh": ("vLLM", vllm_launch(deployment, **asked)),
        "sglang.sh": ("SGLang", sglang_launch(deployment, **asked)),
    }
    title = f"{name}: {deployment.name}, tp {deployment.parallel.tp}, pp {deployment.parallel.pp}, with"
    return {
        file: server_script(f"{title} {engine}.", launch, _model(launch.command), deployment)
        for file, (engine, launch) in launches.items()
    }


def _model(command: tuple[str, ...]) -> str:
    before = "--model-path" if "--model-path" in command else "serve"
    return command[command.index(before) + 1]


def _manifest(deployment: Deployment, name: str) -> str | None:
    """The resources, where a pod can hold a replica and the checkpoint is known."""
    known = PLACEHOLDER not in vllm_launch(deployment).command
    if not (fits_node(deployment) and known and asks_nvidia(deployment)):
        return None
    return kubernetes_manifest(deployment, name=dns_name(name))


def dns_name(name: str) -> str:
    """A name as Kubernetes takes it."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return (plain if plain[:1].isalpha() else f"engine-{plain}")[:48].strip("-")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"cannot make the folder {folder}: {error.strerror}. Choose another place"
        ) from error
