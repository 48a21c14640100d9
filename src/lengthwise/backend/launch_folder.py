"""A launch folder: all that one needs to run a simulated deployment and to check the claim."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lengthwise.backend.kubernetes import asks_nvidia, kubernetes_manifest
from lengthwise.backend.launch import (
    PLACEHOLDER,
    Launch,
    comment,
    default_model,
    exports,
    fits_node,
    flags,
    invocation,
    published_checkpoint,
    replica_gpus,
    router_policy,
    script,
    visible_gpus,
)
from lengthwise.backend.sglang import sglang_launch
from lengthwise.backend.vllm import phased_launch, split_launches, vllm_launch
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError, OutputError
from lengthwise.schema.files import write_whole
from lengthwise.schema.workload import Workload

PORT = 8000
"""Where requests go: the one replica, or the router before several."""


def first_port(deployment: Deployment) -> int:
    """The port of the first replica; with several, the router has the one before."""
    return PORT if deployment.parallel.replicas == 1 else PORT + 1


def server_script(title: str, launch: Launch, model: str, deployment: Deployment) -> str:
    """Starts every replica of a node, each on its GPUs and its port.

    Args:
        title: The first comment.
        launch: The first replica's command.
        model: The checkpoint in it, which ``MODEL`` may replace.
        deployment: How many replicas, of how many GPUs, on which nodes.
    """
    replaced = {"serve": '"$MODEL"', "--model-path": '"$MODEL"', "--host": '"$HOST"', "--port": '"$2"'}
    command = invocation(launch.command, replaced, "  ")
    kept = {name: value for name, value in launch.environment.items() if name != "CUDA_VISIBLE_DEVICES"}
    head = default_model(model) + "HOST=${HOST:-127.0.0.1}\n" + exports(kept)
    serve = f"serve() {{\n  CUDA_VISIBLE_DEVICES=$1\n  export CUDA_VISIBLE_DEVICES\n  exec {command}\n}}\n"
    return script(title, launch, f"{head}\n# serve GPUS PORT\n{serve}\n{_start(deployment)}")


def _start(d: Deployment) -> str:
    here = _replicas_of_a_node(d)
    gpus = [visible_gpus(d, replica) for replica in range(here)]
    if d.parallel.replicas == 1:
        return f"serve {gpus[0]} {PORT}\n"
    more = "" if here == d.parallel.replicas else _several_nodes(d, here)
    return f"""{more}pids=
stop() {{
  trap - INT TERM
  kill $pids 2>/dev/null || true
  wait
}}
trap stop INT TERM

port={first_port(d)}
for gpus in {" ".join(gpus)}; do
  serve "$gpus" "$port" &
  pids="$pids $!"
  port=$((port + 1))
done
wait
"""


def _replicas_of_a_node(d: Deployment) -> int:
    return min(d.parallel.replicas, d.node.gpus // replica_gpus(d)) if fits_node(d) else 1


def _several_nodes(d: Deployment, current: int) -> str:
    text = f"A node holds {current} of the {d.parallel.replicas} replicas: run this on each node, with HOST=0.0.0.0."
    return comment(text) + "\n"


def router_script(deployment: Deployment) -> str:
    """A router before several replicas, with the policy that stands nearest to the simulated one."""
    first = first_port(deployment)
    urls = [f"http://127.0.0.1:{first + replica}" for replica in range(_replicas_of_a_node(deployment))]
    command = ("vllm-router", "--host", "127.0.0.1", "--port", str(PORT), "--policy", router_policy(deployment))
    note = f"Install it: pip install vllm-router. It waits for the replicas and listens at port {PORT}."
    launch = Launch((*command, "--worker-urls", "$WORKERS"), notes=(note,))
    title = f"A router before the {deployment.parallel.replicas} replicas; WORKERS lists their addresses."
    known = shlex.quote(" ".join(urls))
    default = f"WORKERS=${{WORKERS:-{known}}}\n"
    words = invocation(launch.command, {"--worker-urls": "$WORKERS"})
    return script(title, launch, f"{default}\nexec {words}\n")


def load_test_script(launch: Launch, model: str) -> str:
    """Replays the trace beside the script; ``ENDPOINT`` says where."""
    title = "The simulated requests against the real server: latencies and throughput, kept in measured.json."
    replaced = {"--model": '"$MODEL"', "--base-url": '"$ENDPOINT"'}
    head = default_model(model) + f"ENDPOINT=${{ENDPOINT:-http://127.0.0.1:{PORT}}}\n"
    body = f'cd "$(dirname "$0")"\n{head}{exports(launch.environment)}\nexec {invocation(launch.command, replaced)}\n'
    return script(title, launch, body)


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
        _entries("Both", both),
        _entries("vLLM (vllm.sh)", [note for note in vllm if note not in both]),
        _entries("SGLang (sglang.sh)", [note for note in sglang if note not in both]),
        _entries("The load test", list(sent.notes)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _steps(d: Deployment, *, manifest: bool) -> str:
    lines = ["Start the engine (`MODEL=... sh vllm.sh` loads another checkpoint), `sh vllm.sh` or `sh sglang.sh`."]
    if d.parallel.replicas > 1:
        lines.append("Start the router that stands before the replicas, `sh router.sh` (vllm-router, from PyPI).")
    lines += [
        f"Send the simulated requests, `sh load-test.sh` (`ENDPOINT=...` if not at port {PORT} of this machine).",
        "Compare measured.json with the claim. `lengthwise simulate scenario.toml` shows all that was simulated.",
    ]
    if manifest:
        lines.append("On Kubernetes: `kubectl apply -f kubernetes.yaml`, then port-forward the Service to test it.")
    return "\n".join(f"{i}. {line}" for i, line in enumerate(lines, 1))


def _entries(owner: str, notes: list[str]) -> str:
    if not notes:
        return ""
    return f"### {owner}\n\n" + "\n".join(f"- {' '.join(note.split())}" for note in notes)


MAX_REQUESTS = 1000
"""Requests of a load test unless more are asked for."""


def load_test(
    deployment: Deployment,
    workload: Workload,
    *,
    trace: str,
    rate_rps: float,
    num_requests: int = MAX_REQUESTS,
    model: str | None = None,
    served_name: str | None = None,
    base_url: str = "http://127.0.0.1:8000",
) -> Launch:
    """The command that replays a trace of the workload and measures TTFT, TPOT, ITL and latency.

    Args:
        deployment: What is served; its model gives the tokenizer.
        workload: The requests as they were simulated, at ``rate_rps``.
        trace: Path of the file that ``write_trace`` wrote from the same workload.
        rate_rps: Requests a second that were simulated, for the record in the result.
        num_requests: How many to send at most, the first ones.
        model: The checkpoint that is served; None takes what the catalog knows.
        served_name: The name it is served under; None takes the model's in the catalog.
        base_url: Where the server, or the router before its replicas, listens.

    Raises:
        InputError: ``num_requests`` is below 1.
    """
    count = _count(workload, num_requests)
    known, _ = published_checkpoint(deployment.model)
    pairs = {
        "--backend": "openai",
        "--base-url": base_url,
        "--endpoint": "/v1/completions",
        "--model": model or known,
        "--served-model-name": served_name or deployment.model.name,
        "--dataset-name": "timed_trace",
        "--dataset-path": trace,
        "--timed-trace-chunk-hash-size": _longest(workload, count),
        "--num-prompts": count,
        "--max-concurrency": workload.concurrency,
        "--ignore-eos": True,
        "--percentile-metrics": "ttft,tpot,itl,e2el",
        "--metric-percentiles": "50,90,99",
        "--ready-check-timeout-sec": 1800,
        "--save-result": True,
        "--result-filename": "measured.json",
    }
    environment = {"PYTHONHASHSEED": "0"}  # the client seeds the prompts' tokens by a string's hash
    command = ("vllm", "bench", "serve", *flags(pairs), "--metadata", f"simulated_rate_rps={rate_rps:g}")
    return Launch(command, environment, _notes(deployment, workload, count, rate_rps))


def write_trace(path: Path | str, workload: Workload, num_requests: int = MAX_REQUESTS) -> None:
    """A JSON-lines file of the first requests: seconds, prompt and output tokens, for ``load_test``.

    A request names one chunk of its own, as long as the longest prompt, so that no two share a prefix.

    Raises:
        InputError: ``num_requests`` is below 1.
        OutputError: The file cannot be written.
    """
    count = _count(workload, num_requests)
    columns = (workload.arrival_s, workload.prompt_tokens, workload.output_tokens)
    rows = zip(*(column[:count].tolist() for column in columns), strict=True)
    write_whole(path, "".join(_line(i, *row) for i, row in enumerate(rows)).encode())


def _line(i: int, arrival_s: float, prompt_tokens: int, output_tokens: int) -> str:
    request = {
        "timestamp": round(arrival_s, 6),
        "input_length": prompt_tokens,
        "output_length": output_tokens,
        "hash_ids": [i],
    }
    return json.dumps(request) + "\n"


def _count(workload: Workload, num_requests: int) -> int:
    if num_requests < 1:
        raise InputError(f"num_requests must be at least 1; it is {num_requests}")
    return min(num_requests, len(workload))


def _longest(workload: Workload, count: int) -> int:
    return int(workload.prompt_tokens[:count].max())


def _notes(deployment: Deployment, workload: Workload, count: int, rate_rps: float) -> tuple[str, ...]:
    arrivals = (
        f"{workload.concurrency} requests are kept in the system, as simulated."
        if workload.concurrency
        else f"Requests leave at the simulated times, {rate_rps:g} a second on average."
    )
    made = [
        f"The first {count} of {len(workload)} requests are sent. {arrivals}",
        (
            "Prompts are random token ids of the simulated lengths; outputs run to the simulated lengths because the "
            "end of sequence is ignored."
        ),
    ]
    if workload.priority is not None or deployment.scheduler.rank not in ("fcfs", "fcfs_evicted_first"):
        made.append("vllm bench serve sends no `priority`: requests are served as they come.")
    return tuple(made)


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
    texts["load-test.sh"] = load_test_script(sent, _command_model(vllm_launch(deployment).command))
    texts["README.md"] = readme(deployment, name, claim, sent, manifest=bool(manifest))
    return texts


def _servers(deployment: Deployment, name: str) -> dict[str, str]:
    asked: Any = {"port": first_port(deployment), "device": "cpu" if deployment.gpu.name.startswith("CPU") else "cuda"}
    launches = {
        "vllm.sh": ("vLLM", vllm_launch(deployment, **asked)),
        "sglang.sh": ("SGLang", sglang_launch(deployment, **asked)),
    }
    title = f"{name}: {deployment.name}, tp {deployment.parallel.tp}, pp {deployment.parallel.pp}, with"
    return {
        file: server_script(f"{title} {engine}.", launch, _command_model(launch.command), deployment)
        for file, (engine, launch) in launches.items()
    }


def _command_model(command: tuple[str, ...]) -> str:
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
        raise OutputError(f"cannot make the folder {folder}: {error.strerror}. Choose another place") from error


ENCODE_PORT, DECODE_PORT = PORT + 100, PORT + 200
ENCODE_CHANNEL, DECODE_CHANNEL = 5600, 5700
"""First ports of each side: of its engines, and where they tell each other what is handed over."""


def side_script(title: str, launch: Launch, model: str, gpus: list[str], port: int, channel: int) -> str:
    """Starts every engine of one side on a node, each on its GPUs and its ports.

    Args:
        title: The first comment.
        launch: The first engine's command.
        model: The checkpoint in it, which ``MODEL`` may replace.
        gpus: The GPUs of each engine, comma-separated.
        port: Of the first engine; the others follow.
        channel: The port of its side channel; likewise.
    """
    replaced = {"serve": '"$MODEL"', "--host": '"$HOST"', "--port": '"$2"'}
    command = invocation(launch.command, replaced, "  ")
    head = default_model(model) + "HOST=${HOST:-127.0.0.1}\n"
    serve = (
        "# serve GPUS PORT CHANNEL\nserve() {\n"
        "  CUDA_VISIBLE_DEVICES=$1 VLLM_NIXL_SIDE_CHANNEL_PORT=$3 VLLM_NIXL_SIDE_CHANNEL_HOST=$HOST\n"
        "  export CUDA_VISIBLE_DEVICES VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_NIXL_SIDE_CHANNEL_HOST\n"
        f"  exec {command}\n}}\n"
    )
    return script(title, launch, f"{head}\n{serve}\n{_started(gpus, port, channel)}")


def _started(gpus: list[str], port: int, channel: int) -> str:
    if len(gpus) == 1:
        return f"serve {gpus[0]} {port} {channel}\n"
    lines = [f'serve {seen} {port + i} {channel + i} &\npids="$pids $!"\n' for i, seen in enumerate(gpus)]
    stop = "stop() {\n  trap - INT TERM\n  kill $pids 2>/dev/null || true\n  wait\n}\ntrap stop INT TERM\n"
    return f"pids=\n{stop}{''.join(lines)}wait\n"


def split_router_script(pairs: int) -> str:
    """The router that sends each request to an encoding engine and then to a decoding one."""
    command = ["vllm-router", "--host", "127.0.0.1", "--port", str(PORT), "--vllm-pd-disaggregation"]
    for i in range(pairs):
        command += ["--prefill", f"http://127.0.0.1:{ENCODE_PORT + i}"]
    for i in range(pairs):
        command += ["--decode", f"http://127.0.0.1:{DECODE_PORT + i}"]
    note = f"Install it: pip install vllm-router. It listens at port {PORT}, where requests go."
    title = "The router before the two sides. On several nodes name the addresses of all engines."
    launch = Launch((*command, "--policy", "round_robin"), notes=(note,))
    return script(title, launch, f"exec {shlex.join(command)} \\\n  --policy round_robin\n")


PLAN = "PLAN.json"


@dataclass(frozen=True)
class ScheduledEngines:
    """The engines of a schedule.

    Attributes:
        title: The schedule in words.
        encode: The engine that encodes; of phases the one that does all.
        decode: The engine that decodes; None: the same.
        pairs: Such pairs side by side.
        phases: What vLLM's scheduler is told, where it can keep phases itself; empty: nothing.
    """

    title: str
    encode: Deployment
    decode: Deployment | None = None
    pairs: int = 1
    phases: Mapping[str, Any] = field(default_factory=dict)


def scheduled_scripts(engines: ScheduledEngines) -> dict[str, str]:
    """Shell scripts by file name."""
    device = "cpu" if engines.encode.gpu.name.startswith("CPU") else "cuda"
    if engines.decode is not None:
        return _split(engines, engines.decode, device)
    plain = vllm_launch(engines.encode, device=device)
    scripts = {"vllm.sh": _server(f"{engines.title}, phases kept by the gateway before it.", plain, engines)}
    if engines.phases:
        launch = phased_launch(engines.encode, engines.phases, device=device)
        scripts["vllm-phases.sh"] = _server(f"{engines.title}, phases kept inside vLLM.", launch, engines)
    return scripts


def require_new(folder: Path, *, force: bool) -> None:
    """Nothing, if files may be put there.

    Raises:
        OutputError: The folder has files already, which only ``force`` lets be replaced.
    """
    if not force and folder.is_dir() and any(folder.iterdir()):
        raise OutputError(f"{folder} has files already; name another folder, or replace them with --force")


def write_texts(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """The files in a folder, which is made if it is absent, each whole; returns their paths.

    Raises:
        OutputError: One cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make the folder {folder}: {error.strerror}") from error
    for name, text in texts.items():
        write_whole(folder / name, text.encode())
        (folder / name).chmod(0o755 if name.endswith(".sh") else 0o644)
    return [folder / name for name in texts]


def _server(title: str, launch: Launch, engines: ScheduledEngines) -> str:
    return server_script(title, launch, _launch_model(launch), engines.encode)


def _split(engines: ScheduledEngines, decode: Deployment, device: str) -> dict[str, str]:
    first, second = split_launches(engines.encode, decode, device=device)
    one, other = engines.encode.parallel.gpus, decode.parallel.gpus
    here = min(engines.pairs, engines.encode.node.gpus // (one + other))
    starts = range(0, here * (one + other), one + other)
    encoding = [_visible(start, one) for start in starts]
    decoding = [_visible(start + one, other) for start in starts]
    more = "" if here == engines.pairs else f" Run it on each node: one holds {here} of {engines.pairs} pairs."
    return {
        "prefill.sh": side_script(
            f"{engines.title}: encodes.{more}", first, _launch_model(first), encoding, ENCODE_PORT, ENCODE_CHANNEL
        ),
        "decode.sh": side_script(
            f"{engines.title}: decodes.{more}", second, _launch_model(second), decoding, DECODE_PORT, DECODE_CHANNEL
        ),
        "router.sh": split_router_script(here),
    }


def _launch_model(launch: Launch) -> str:
    return launch.command[launch.command.index("serve") + 1]


def _visible(start: int, gpus: int) -> str:
    return ",".join(map(str, range(start, start + gpus)))


def entries(items: Sequence[str]) -> str:
    """Lines of a list."""
    return "\n".join(f"- {' '.join(item.split())}" for item in items)
