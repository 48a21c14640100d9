"""The README of a launch folder: the claim, what to run in which order, what differs."""

from __future__ import annotations

from lengthwise.backend._scripts import PORT
from lengthwise.backend.launch import Launch
from lengthwise.backend.sglang import sglang_launch
from lengthwise.backend.vllm import vllm_launch
from lengthwise.schema.deployment import Deployment


def readme(deployment: Deployment, name: str, claim: str, sent: Launch, *, manifest: bool) -> str:
    """The text of README.md.

    Args:
        deployment: What was chosen.
        name: Of the configuration.
        claim: What the simulation says of it.
        sent: The load test.
        manifest: Whether kubernetes.yaml stands beside.
    """
    vllm, sglang = vllm_launch(deployment).notes, sglang_launch(deployment).notes
    both = [note for note in vllm if note in sglang]
    parts = [
        f"# {name}",
        claim,
        (
            f"{deployment.name}: tp {deployment.parallel.tp}, pp {deployment.parallel.pp}, "
            f"{deployment.parallel.replicas} replica(s), {deployment.price_per_hour_usd:.2f} USD an hour at the "
            "catalog's prices. This was simulated, not measured; below is how to measure it."
        ),
        "## Run it",
        _steps(deployment, manifest=manifest),
        "## What the engines do otherwise",
        _listed("Both", both),
        _listed("vLLM (vllm.sh)", [note for note in vllm if note not in both]),
        _listed("SGLang (sglang.sh)", [note for note in sglang if note not in both]),
        _listed("The load test", list(sent.notes)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _steps(d: Deployment, *, manifest: bool) -> str:
    lines = [
        "Start the engine (`MODEL=... sh vllm.sh` loads another checkpoint), `sh vllm.sh` or `sh sglang.sh`."
    ]
    if d.parallel.replicas > 1:
        lines.append(
            "Start the router that stands before the replicas, `sh router.sh` (vllm-router, from PyPI)."
        )
    lines += [
        f"Send the simulated requests, `sh load-test.sh` (`ENDPOINT=...` if not at port {PORT} of this machine).",
        "Compare measured.json with the claim. `lengthwise simulate scenario.toml` shows all that was simulated.",
    ]
    if manifest:
        lines.append(
            "On Kubernetes: `kubectl apply -f kubernetes.yaml`, then port-forward the Service to test it."
        )
    return "\n".join(f"{i}. {line}" for i, line in enumerate(lines, 1))


def _listed(who: str, notes: list[str]) -> str:
    if not notes:
        return ""
    return f"### {who}\n\n" + "\n".join(f"- {' '.join(note.split())}" for note in notes)
