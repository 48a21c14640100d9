"""Launch folders: the files that run a simulated deployment on real engines and check the simulated result."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.backend.kubernetes import (
    ENGINES,
    GATEWAY_FILE,
    GATEWAY_IMAGE,
    LOAD_S,
    RESERVED,
    TOKEN_SECRET,
    VLLM_IMAGE,
    dynamo_manifest,
    hosts_of,
    is_nvidia,
    kubernetes_manifest,
    pod_engine,
    pod_hosts,
    spanning_problem,
)
from lengthwise.backend.launch import (
    ARRIVAL,
    PLACEHOLDER,
    STICKY,
    STICKY_NOTE,
    Launch,
    comment,
    default_model,
    degrees,
    exports,
    fits_node,
    flags,
    gateway_router,
    gateway_toml,
    invocation,
    of_one_replica,
    published_checkpoint,
    replica_gpus,
    roles,
    router_policy,
    script,
    shares_node,
    visible_gpus,
)
from lengthwise.backend.sglang import BOOTSTRAP_PORT, sglang_split_launches
from lengthwise.backend.trtllm import OPTIONS, trtllm_options
from lengthwise.backend.vllm import disaggregated_notes, phased_launch, split_launches, vllm_launch
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError, OutputError
from lengthwise.schema.files import write_atomic
from lengthwise.schema.specs import GB
from lengthwise.schema.workload import UNCAPPED, Workload

PORT = 8000  # port for requests: of the only replica, or of the router in front of several
PREFILL_PORT, DECODE_PORT = PORT + 100, PORT + 200
PREFILL_CHANNEL, DECODE_CHANNEL = 5600, 5700  # first ports of the side channels of KV transfers
DEFAULT_REQUESTS = 1000  # of a load test
TRACE, PLAN = "trace.jsonl", "PLAN.json"
DYNAMO = {"vllm": "dynamo.yaml", "sglang": "dynamo-sglang.yaml"}
_ALWAYS = frozenset({"README.md", "load-test.sh", "scenario.toml", TRACE})
_SPLIT = tuple(f"{engine}-{part}.sh" for engine in ("vllm", "sglang") for part in ("prefill", "decode", "router"))
_SCRIPTS = ("vllm.sh", "sglang.sh", "trtllm.sh", OPTIONS, "router.sh")
_FILES = {*_ALWAYS, *_SPLIT, *_SCRIPTS, "kubernetes.yaml", *DYNAMO.values(), GATEWAY_FILE}
_OF_GROUP = re.compile(r"(vllm|sglang)-group-[0-9]+\.sh")
ADMIN_PORT = 9000  # of the gateway in front of groups, whose engines have the ports after PORT
_ENGINES = {key or "vllm": engine for key, engine in ENGINES.items()}
_NUMBERED = re.compile(r"([a-z0-9-]+-)?[0-9]+-[a-z0-9-]+")  # [VARIANT-]RANK-NAME
_HOST = "HOST=${HOST:-127.0.0.1}\n"
_STOP = """stop() {
  trap - INT TERM
  kill $pids 2>/dev/null || true
  wait
}
trap stop INT TERM
"""


def _first_port(deployment: Deployment) -> int:
    return PORT if deployment.parallel.replicas == 1 else PORT + 1  # the router has PORT


def _node_replicas(d: Deployment) -> int:
    return min(d.parallel.replicas, d.node.host_gpus // replica_gpus(d)) if fits_node(d) else 1


def _model_of(command: tuple[str, ...]) -> str:
    before = "--model-path" if "--model-path" in command else "serve"
    return command[command.index(before) + 1]


def server_script(title: str, launch: Launch, deployment: Deployment) -> str:
    """Return a script that starts a node's replicas, each on its GPUs and port, with the command ``launch``."""
    d, first = deployment, _first_port(deployment)
    replaced = {"serve": '"$MODEL"', "--model-path": '"$MODEL"', "--host": '"$HOST"', "--port": '"$2"'}
    replaced["--config"] = f'"$(dirname "$0")/{OPTIONS}"'
    command = invocation(launch.command, replaced, "  ")
    environment = {name: value for name, value in launch.environment.items() if name != "CUDA_VISIBLE_DEVICES"}
    head = default_model(_model_of(launch.command)) + _HOST + exports(environment)
    serve = f"serve() {{\n  CUDA_VISIBLE_DEVICES=$1\n  export CUDA_VISIBLE_DEVICES\n  exec {command}\n}}\n"
    replicas = _node_replicas(d)
    gpus = [visible_gpus(d, replica) for replica in range(replicas)]
    if d.parallel.replicas == 1:
        start = f"serve {gpus[0]} {PORT}\n"
    else:
        note = ""
        if replicas < d.parallel.replicas:
            text = f"A node holds {replicas} of the {d.parallel.replicas} replicas: run this on each node, with"
            note = comment(f"{text} HOST=0.0.0.0.") + "\n"
        start = f"""{note}pids=
{_STOP}
port={first}
for gpus in {" ".join(gpus)}; do
  serve "$gpus" "$port" &
  pids="$pids $!"
  port=$((port + 1))
done
wait
"""
    return script(title, launch, f"{head}\n# serve GPUS PORT\n{serve}\n{start}")


def router_script(deployment: Deployment) -> str:
    """Return a script that starts a router for the replicas, with the policy nearest to the simulated one."""
    first = _first_port(deployment)
    urls = [f"http://127.0.0.1:{first + replica}" for replica in range(_node_replicas(deployment))]
    command = ("vllm-router", "--host", "HOST", "--port", str(PORT), "--policy", router_policy(deployment))
    note = f"Install it: pip install vllm-router. It waits for the replicas and listens at HOST, port {PORT}."
    notes = (note, STICKY_NOTE) if STICKY in command else (note,)
    launch = Launch((*command, "--worker-urls", "$WORKERS"), notes=notes)
    title = f"A router in front of the {deployment.parallel.replicas} replicas; WORKERS lists their addresses."
    default = f"WORKERS=${{WORKERS:-{shlex.quote(' '.join(urls))}}}\n"
    words = invocation(launch.command, {"--host": '"$HOST"', "--worker-urls": "$WORKERS"})
    return script(title, launch, f"{_HOST}{default}\nexec {words}\n")


def load_test_script(launch: Launch, model: str) -> str:
    """Return a script that replays the trace in its folder. Its variable ``ENDPOINT`` is the server's address."""
    title = "Sends the simulated requests to the real server; measured.json has latencies and throughput."
    replaced = {"--model": '"$MODEL"', "--base-url": '"$ENDPOINT"'}
    head = default_model(model) + f"ENDPOINT=${{ENDPOINT:-http://127.0.0.1:{PORT}}}\n"
    body = f'cd "$(dirname "$0")"\n{head}{exports(launch.environment)}\nexec {invocation(launch.command, replaced)}\n'
    return script(title, launch, body)


def readme(deployment: Deployment, name: str, claim: str, load_launch: Launch, *, manifests: Sequence[str]) -> str:
    """Return the text of README.md. ``manifests`` are the folder's YAML files."""
    d, has_manifest = deployment, "kubernetes.yaml" in manifests
    own_price = d.price_per_hour_usd > d.gpu_price_per_hour_usd
    priced = "at the catalog's prices" + (" for GPUs and the scenario's for memory" if own_price else "")
    untested = ""
    launches, missing = _launches_of(d)
    several = len(d.sides) > 1
    names = {key: [f"{key}-{role}.sh" for role in roles(d)] if several else [f"{key}.sh"] for key in launches}
    if d.decode is not None:
        untested = (
            " vLLM's commands for separate sides ran on CPUs, never on GPUs; those of SGLang and kubernetes.yaml never "
            "ran."
        )
    elif d.groups:
        untested = " The scripts of several groups and kubernetes.yaml never ran on GPUs."
    notes = {f"{_ENGINES[key].title} ({', '.join(names[key])})": _notes_of(d, of) for key, of in launches.items()}
    shared = [note for note in next(iter(notes.values())) if all(note in of for of in notes.values())]
    scripts = ", or ".join(" and ".join(f"`sh {name}`" for name in of) for of in names.values())
    versions = ", ".join(_ENGINES[key].release for key in launches)
    given = f"`MODEL=... sh {next(iter(names.values()))[0]}` loads another checkpoint; flags of {versions}"
    steps = [f"Start the {'engines' if several else 'engine'}, {scripts} ({given}).{_where(d)}"]
    if d.decode is not None:
        router = " or ".join(f"`sh {key}-router.sh`" for key in launches)
        addresses = " PREFILLS and DECODES list the replicas' addresses on their nodes." if not shares_node(d) else ""
        steps.append(f"Start the router in front of both sides, {router} (from PyPI).{addresses}")
    elif d.groups:
        edit = "" if shares_node(d) else f" First write the nodes' addresses into {GATEWAY_FILE}."
        steps.append(
            "Start the router in front of all groups, `sh router.sh`: lengthwise's gateway (`pip install "
            f"'lengthwise[gateway]'`), by {GATEWAY_FILE}.{edit}"
        )
    elif d.parallel.replicas > 1:
        steps.append("Start the router in front of the replicas, `sh router.sh` (vllm-router, from PyPI).")
    where = f"`ENDPOINT=...` if not at port {PORT} of this machine"
    client = "It runs `vllm bench serve`: install vLLM (`pip install vllm`) where you start it, whatever the engine."
    steps += [
        f"Send the simulated requests, `sh load-test.sh` ({where}). {client}",
        'Compare measured.json with the numbers under "The load test" below.',
        "`lengthwise simulate scenario.toml --json numbers.json` repeats the claim.",
    ]
    if has_manifest:
        steps.append(f"Or run {pod_engine(d).title} on Kubernetes, by kubernetes.yaml: see below.")
    if on_dynamo := [file for file in DYNAMO.values() if file in manifests]:
        steps.append(f"Or run the engine on NVIDIA Dynamo, by {' or '.join(on_dynamo)}: see below.")
    sections = {
        "The router": [gateway_router(d)[1]] if d.groups else [],
        "All engines": shared,
        **{title: [note for note in of if note not in shared] for title, of in notes.items()},
        "Engines without a script": [f"{_ENGINES[key].title}: {reason}." for key, reason in missing.items()],
        "The load test": load_launch.notes,
    }
    parts = [
        f"# {d.model.name}: {name}",
        f"This was simulated, not measured; below is how to measure it.{untested}",
        "\n".join(f"- {row}" for row in (*_shape_rows(d), f"{d.price_per_hour_usd:.2f} USD an hour, {priced}")),
        claim,
        "## Run it",
        "\n".join(f"{i}. {step}" for i, step in enumerate(steps, 1)),
        *(["## On Kubernetes", _on_kubernetes(d, dns_name(name))] if has_manifest else []),
        *(["### Operate", entries([*_operations(d, dns_name(name))])] if has_manifest else []),
        *(["## On Dynamo", _on_dynamo(dns_name(name), on_dynamo)] if on_dynamo else []),
        "## What the engines do otherwise",
        *(f"### {title}\n\n{entries(notes)}" for title, notes in sections.items() if notes),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _shape_rows(d: Deployment) -> list[str]:
    """Return a row for each side or group: its replicas, their division and their GPUs."""
    rows = []
    for role, side in zip(_titles(d), d.sides, strict=True):
        hosts = f", each replica on {hosts_of(side)} hosts" if hosts_of(side) > 1 else ""
        rows.append(
            f"{role or 'All replicas'}: {side.parallel.replicas} x ({degrees(side)}), on {side.hardware} "
            f"({side.node.name}){hosts}"
        )
    if d.decode is not None and (transfer := d.decode.kv_transfer).link:
        rows.append(
            f"KV transfer between the sides: simulated over {transfer.link}, {transfer.bytes_per_s / GB:.4g} GB/s for "
            "each GPU"
        )
    if d.decode is not None and d.decode.prefills:
        rows.append(
            "The simulation prefills some prompts on the decode side (max_local_prefill_length, "
            "max_prefill_queue_size). The routers of these files send every prompt to a prefill replica; Dynamo's has "
            "--router-conditional-disagg"
        )
    if d.decode is not None and d.decode.kv_transfer.layers:
        rows.append(
            "The simulation transfers the KV cache layer by layer during the prefill (layerwise). These files take "
            "NIXL, which transfers it after the prefill. A connector that sends layers, such as vLLM Ascend's "
            "MooncakeLayerwiseConnector, takes its place in --kv-transfer-config"
        )
    if d.decode is not None and math.isfinite(d.decode.kv_transfer.timeout_s):
        rows.append(
            "The simulation has a timeout of waiting KV transfers (kv_transfer_timeout); these files leave the "
            "engine's own. vLLM takes kv_load_failure_policy in --kv-transfer-config"
        )
    return rows


def _where(d: Deployment) -> str:
    """Return where the scripts run if one node does not have all replicas, for each part: on how many nodes."""
    if shares_node(d):
        return ""
    texts = []
    for role, side in zip(roles(d), d.sides, strict=True):
        hosts = side.parallel.replicas * hosts_of(side)
        if fits_node(side):
            hosts = -(-side.parallel.replicas // _node_replicas(side))
        of = f"the {role} script" if role != "engine" else "the script"
        ranks = " (see the ranks below)" if not fits_node(side) else ""
        texts.append(f"{of} on {hosts} {'node' if hosts == 1 else 'nodes'} with {side.gpu.name}{ranks}")
    first = " The sides share no node." if d.decode is not None else " The groups share no node." if d.groups else ""
    return f"{first} Run {' and '.join(texts)}, with HOST= the node's address."


def _titles(d: Deployment) -> list[str]:
    """Return the names of the sides or groups as they begin a row, or "" for all replicas."""
    if d.decode is not None:
        return ["Prefill side", "Decode side"]
    return list(roles(d)) if d.groups else [""]


def _notes_of(d: Deployment, launches: Sequence[Launch]) -> list[str]:
    """Return the notes of an engine's commands; a note of only some of the commands names its side or group."""
    both = [note for note in launches[0].notes if all(note in one.notes for one in launches)]
    own = [
        f"{title}: {note}"
        for title, one in zip(_titles(d), launches, strict=True)
        for note in one.notes
        if note not in both
    ]
    return [*both, *own]


def _on_dynamo(name: str, files: list[str]) -> str:
    either = " or ".join(f"`kubectl apply -f {file}`" for file in files)
    return (
        f"With Dynamo's operator in the cluster: {either}, after the Secret of a gated model as for "
        f"kubernetes.yaml. The frontend routes: `kubectl port-forward service/{name}-frontend {PORT}` makes its port "
        "one of this machine. No test has run this."
    )


def _on_kubernetes(d: Deployment, name: str) -> str:
    apply = (
        "If Hugging Face shows the model as gated, first create the Secret with your token, from a file `token`: "
        f"`kubectl create secret generic {TOKEN_SECRET} --from-file=token`. Then `kubectl apply -f kubernetes.yaml`."
    )
    if d.groups:
        apply += f" The gateway's image ({GATEWAY_IMAGE}) must be built first; see the file."
    if d.parallel.replicas == 1 or d.decode is not None or d.groups:
        forward = f"kubectl port-forward service/{name} {PORT}"
        return f"{apply} For the load test, `{forward}` makes the Service's port one of this machine."
    workers = " ".join(f"http://{host}:{PORT}" for host in pod_hosts(d, name))
    commands = (
        f"kubectl run load-test --image={VLLM_IMAGE} --command -- sleep infinity",
        "kubectl wait --for=condition=Ready --timeout=1h pod/load-test",
        "kubectl cp . load-test:/tmp/launch",
        f"kubectl exec load-test -- env ENDPOINT=http://{name}:{PORT} sh /tmp/launch/load-test.sh",
        "kubectl cp load-test:/tmp/launch/measured.json measured.json",
    )
    test = (
        "A port-forward of the Service reaches one pod, and a load test through it measures 1 of "
        f"{d.parallel.replicas} replicas. Run the test in a pod of the cluster (for a gated model, with "
        "`--env=HF_TOKEN=...` in the first command, as the test reads the tokenizer):"
    )
    router = (
        "The Service spreads connections over the pods whatever their load. For the router nearest to the simulated "
        "one, start router.sh in that pod before the test, after `pip install vllm-router` and with "
        f"`WORKERS='{workers}'`, and leave ENDPOINT out. Another way is the gateway of lengthwise, by `deploy/` of its "
        "repository."
    )
    return "\n\n".join((apply, test, "\n".join(f"    {command}" for command in commands), router))


def _operations(d: Deployment, name: str) -> Iterator[str]:
    """Yield how to operate the pods of kubernetes.yaml: readiness, loading, scale, a lost pod, NIXL."""
    parts = roles(d)
    own = [f"{name}-{role}" for role in parts] if parts[1:] else [name]
    sets = [
        f"statefulset/{one}" if fits_node(side) else f"leaderworkerset/{one}-pods"
        for one, side in zip(own, d.sides, strict=True)
    ]
    pods = f"pods -l app.kubernetes.io/name={name}"
    status = " and ".join(f"`kubectl rollout status {one}`" for one in sets if one.startswith("stateful"))
    sides = " of both sides and the router" if d.decode is not None else " of all groups" if d.groups else ""
    yield (
        f"Ready: `kubectl wait --for=condition=Ready --timeout={LOAD_S // 60}m {pods}` ends when all pods{sides} are "
        f"ready; `kubectl get {pods}` lists them. {f'Progress: {status}.' if status else ''}"
        + (" The router's pod is ready once its port is open, with or without engines." if d.decode is not None else "")
    )
    yield (
        f"Loading: an engine has {LOAD_S // 60} minutes to download, load and compile the model; then Kubernetes "
        "starts its container again (startupProbe). Each new pod downloads the model, unless a volume keeps it."
    )
    scale = " or ".join(f"`kubectl scale {one} --replicas=N`" for one in sets)
    if d.groups:
        yield (
            f"Scale: {scale}. The gateway has the addresses of its ConfigMap and no others: change them there "
            f"(`kubectl edit configmap/{name}-router`), then `kubectl rollout restart deployment/{name}-router`."
        )
        return
    if d.decode is None:
        yield f"Scale: {scale}; the Service then has the pods that are ready."
        yield "A lost pod: its requests fail, and clients must send them again. Kubernetes starts the pod again."
        return
    side = replace(d.sides[1], parallel=replace(d.sides[1].parallel, replicas=d.sides[1].parallel.replicas + 1))
    yield (
        f"Scale: {scale}. The router has the addresses in its command and no others: after the change, add or remove "
        f"them there (`kubectl edit deployment/{name}-router`), which starts the router again. The next decode replica "
        f"has `--decode http://{pod_hosts(side, own[1])[-1]}:{PORT}`. To make a side smaller, change the router first."
    )
    group = " with all pods of its group" if not fits_node(side) else ""
    yield (
        "A lost decode pod: its requests lose their KV caches, and streams that have begun end: clients must send "
        f"these requests again. Kubernetes starts the pod again{group}, at the address that the router has; it loads "
        "the model first."
    )
    yield (
        "NIXL: vLLM's images have it if they are built with INSTALL_KV_CONNECTORS=true. lengthwise did not check "
        f"{VLLM_IMAGE}: `kubectl logs {pod_hosts(d.sides[0], own[0])[0].partition('.')[0]} | grep NIXL` "
        'shows "NIXL is available" or "NIXL is not available".'
    )


def entries(items: Sequence[str]) -> str:
    """Return the items as lines of a Markdown list."""
    return "\n".join(f"- {' '.join(item.split())}" for item in items)


def load_test(
    deployment: Deployment,
    workload: Workload,
    *,
    trace: str,
    rate_rps: float,
    num_requests: int = DEFAULT_REQUESTS,
    base_url: str = "http://127.0.0.1:8000",
) -> Launch:
    """Return the command that replays a trace of the workload and measures TTFT, TPOT, ITL and latency.

    ``trace`` is a file that ``write_trace`` wrote from the same workload. The first ``num_requests`` requests are sent.
    ``base_url`` is the address of the server or of the router. Raises InputError if ``num_requests`` is below 1.
    """
    count = _count(workload, num_requests)
    pairs = {
        "--backend": "openai",
        "--base-url": base_url,
        "--endpoint": "/v1/completions",
        "--model": published_checkpoint(deployment.model)[0],
        "--served-model-name": deployment.model.name,
        "--dataset-name": "timed_trace",
        "--dataset-path": trace,
        "--timed-trace-chunk-hash-size": _chunk_tokens(workload, count),
        "--timed-trace-sec-multiplier": 0.001,
        "--num-prompts": count,
        "--max-concurrency": workload.concurrency,
        "--ignore-eos": True,
        "--percentile-metrics": "ttft,tpot,itl,e2el",
        "--metric-percentiles": "50,90,95,99",
        "--ready-check-timeout-sec": 1800,
        "--save-result": True,
        "--result-filename": "measured.json",
    }
    environment = {"PYTHONHASHSEED": "0"}  # the client seeds the prompts' tokens by a string's hash
    command = ("vllm", "bench", "serve", *flags(pairs), "--metadata", f"simulated_rate_rps={rate_rps:g}")
    sent_rps = (count - 1) / span_s if (span_s := workload.arrival_s[count - 1] - workload.arrival_s[0]) else rate_rps
    arrivals = (
        f"{workload.concurrency} requests are kept in the system, as simulated."
        if workload.concurrency
        else f"Requests leave at the simulated times, {sent_rps:.3g} a second on average (claim: {rate_rps:.3g})."
    )
    notes = [
        (f"The first {count} of {len(workload)} requests are sent. " if count < len(workload) else "") + arrivals,
        (
            "Prompts are random token ids of the simulated lengths; outputs run to the simulated lengths because the "
            "end of sequence is ignored."
        ),
    ]
    if workload.prefixes is not None:
        notes.append(
            "Prompts begin alike as simulated. Later turns have random tokens in place of the earlier outputs, so that "
            "the engine's cache finds less of them than the simulated one."
        )
    if workload.max_tokens is not None and (workload.max_tokens[:count] != workload.output_tokens[:count]).any():
        notes.append(
            "vllm bench serve sends the length of each output as `max_tokens`, not the client's limit, and an engine "
            "that admits by `max_tokens`, as SGLang and TensorRT-LLM do, admits more requests so: the load test was "
            "simulated with these lengths as limits, the claim with the clients' limits. "
            f"`lengthwise bench ENDPOINT --workload {TRACE} --no-exact` sends the clients' limits, and then outputs "
            "end where the model ends them."
        )
    if workload.priority is not None or deployment.scheduler.rank not in ARRIVAL:
        notes.append("vllm bench serve sends no `priority`: requests are served in order of arrival.")
    return Launch(command, environment, tuple(notes))


def as_benchmarked(workload: Workload) -> Workload:
    """Return the requests as ``vllm bench serve`` sends them in a load test.

    ``max_tokens`` is the length of the output, the engine ignores the end of sequence, and no request has a priority.
    """
    lengths, ones = workload.output_tokens.copy(), np.ones(len(workload), np.bool_)
    priority = None if workload.priority is None else np.zeros_like(workload.priority)
    return replace(workload, max_tokens=lengths, ignore_eos=ones, priority=priority)


def write_trace(path: Path | str, workload: Workload, num_requests: int = DEFAULT_REQUESTS) -> None:
    """Write the first requests as JSON lines for ``load_test``: a Mooncake trace with the clients' limits.

    Raises OutputError if that fails, and InputError if requests wait for others, which the trace cannot hold.
    """
    workload.require_independent("a load test by vllm bench serve")
    count = _count(workload, num_requests)
    columns = [c[:count].tolist() for c in (workload.arrival_s * 1e3, workload.prompt_tokens, workload.output_tokens)]
    optional = {name: getattr(workload, name) for name in ("priority", "tenant", "max_tokens", "ignore_eos")}
    more = {name: column[:count].tolist() for name, column in optional.items() if column is not None}
    chunk_tokens, prefixes, rows = _chunk_tokens(workload, count), workload.prefixes, []
    new = 0 if prefixes is None else int(prefixes.block_ids.max(initial=-1)) + 1  # chunks that no other request has
    for i, (at_ms, prompt, output) in enumerate(zip(*columns, strict=True)):
        ids: list[int] = []
        if prefixes is not None:
            ids = prefixes.block_ids[prefixes.start[i] : prefixes.start[i + 1]].tolist()
        chunks = -(-prompt // chunk_tokens)
        ids.extend(range(new, new + chunks - len(ids)))
        new = max(new, ids[-1] + 1)
        row = {"timestamp": round(at_ms, 3), "input_length": prompt, "output_length": output, "hash_ids": ids}
        row |= {"block_size": chunk_tokens} | {name: column[i] for name, column in more.items()}
        if row.get("max_tokens", 0) >= UNCAPPED:
            row["max_tokens"] = None
        rows.append(f"{json.dumps(row)}\n")
    write_atomic(path, "".join(rows).encode())


def _chunk_tokens(workload: Workload, count: int) -> int:
    """Return the tokens of a trace's chunk: a block of shared prefixes, or the longest prompt if nothing is shared."""
    return int(workload.prompt_tokens[:count].max()) if workload.prefixes is None else workload.prefixes.block_tokens


def _count(workload: Workload, num_requests: int) -> int:
    if num_requests < 1:
        raise InputError(f"num_requests must be at least 1; it is {num_requests}")
    return min(num_requests, len(workload))


def write_launch(
    folder: Path,
    deployment: Deployment,
    *,
    name: str,
    scenario_text: str,
    workload: Workload,
    rate_rps: float,
    claim: str,
    expectation: str = "",
) -> list[Path]:
    """Write a launch folder, byte-identical for equal arguments, and return its files.

    The folder has scripts for vLLM and SGLang (for TensorRT-LLM too if its rules were simulated), one for each side if
    prefill and decode replicas are separate, and one for each group of unlike replicas. An engine that cannot run the
    deployment has no script, and the README states the reason. The folder has a router for several replicas, Kubernetes
    resources of the engine whose rules were simulated if a replica fits a node with NVIDIA GPUs and its checkpoint is
    known, a load test with its trace, the scenario, and a README.

    The folder's parent must exist. The load test sends all of ``workload``. The ``claim`` is a sentence with
    the result of the simulation, the ``expectation`` one with that of the load test. Raises InputError if
    no engine can run the deployment, and OutputError if a file cannot be written.
    """
    d = deployment
    launches, _ = _launches_of(d)
    title = f"{name}: {d.name}, {degrees(d)}, with"
    texts = {"README.md": "", "scenario.toml": scenario_text}
    if len(d.sides) > 1:
        texts |= _scripts_of_parts(d, name)
    else:
        for key, (launch,) in launches.items():
            texts[f"{key}.sh"] = server_script(f"{title} {_ENGINES[key].title}.", launch, d)
    if "trtllm" in launches:
        texts[OPTIONS] = trtllm_options(d)
    if d.parallel.replicas > 1 and len(d.sides) == 1:
        texts["router.sh"] = router_script(d)
    (first, *_), rules = next(iter(launches.values())), d.scheduler.engine_rules
    pods = launches.get("vllm" if d.decode is not None else rules or "vllm", ())
    is_known = bool(pods) and PLACEHOLDER not in pods[0].command
    if is_known and is_nvidia(d) and not any(map(spanning_problem, d.sides)):
        texts["kubernetes.yaml"] = kubernetes_manifest(d, name=dns_name(name), token_secret=TOKEN_SECRET)
        for engine, file in DYNAMO.items():
            if engine in launches and not d.groups:
                texts[file] = dynamo_manifest(d, name=dns_name(name), token_secret=TOKEN_SECRET, engine=engine)
    load_launch = load_test(d, workload, trace=TRACE, rate_rps=rate_rps, num_requests=len(workload))
    if expectation:
        load_launch = replace(load_launch, notes=(expectation, *load_launch.notes))
    texts["load-test.sh"] = load_test_script(load_launch, _model_of(first.command))
    texts["README.md"] = readme(d, name, claim, load_launch, manifests=[one for one in texts if one.endswith(".yaml")])
    files = write_texts(folder, texts, parents=False)
    write_trace(folder / TRACE, workload, len(workload))
    return [*files, folder / TRACE]


def _device(deployment: Deployment) -> str:
    return "cpu" if all(side.gpu.name.startswith("CPU") for side in deployment.sides) else "cuda"


def dns_name(name: str) -> str:
    """Return a name that Kubernetes accepts and that resembles the given one."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return (plain if plain[:1].isalpha() and plain != RESERVED else f"engine-{plain}")[:48].strip("-")


def write_texts(folder: Path, texts: Mapping[str, str], *, parents: bool = True) -> list[Path]:
    """Write each file atomically into a folder, which is created if absent. Return the paths. Raises OutputError."""
    try:
        folder.mkdir(parents=parents, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make the folder {folder}: {error.strerror}. Choose another place") from error
    for name, text in texts.items():
        write_atomic(folder / name, text.encode())
        (folder / name).chmod(0o755 if name.endswith(".sh") else 0o644)
    return [folder / name for name in texts]


def require_new(folder: Path, *, force: bool) -> None:
    """Raise OutputError if the folder has files, unless ``force`` allows replacing them."""
    if not force and folder.is_dir() and any(folder.iterdir()):
        raise OutputError(f"{folder} has files already; name another folder, or replace them with --force")


def require_replaceable(folder: Path, *, force: bool) -> list[Path]:
    """Return the launch folders in a folder. Raise OutputError if it has any, unless ``force`` allows replacing them.

    Launch folders with files that ``write_launch`` does not write are never replaced.
    """
    former = _launches(folder)
    if former and not force:
        names = ", ".join(one.name for one in former)
        raise OutputError(
            f"{folder} has launch folders of an earlier search ({names}); name another folder, or replace them with "
            "--force"
        )
    for one in former:
        others = {path.name for path in one.iterdir()} - _FILES
        if other := sorted(name for name in others if not _OF_GROUP.fullmatch(name)):
            raise OutputError(
                f"--force replaces only what a search wrote; {one} also has {', '.join(other)}. Move the folder "
                "elsewhere, or name another one"
            )
    return former


def remove_launches(folder: Path) -> None:
    """Remove the launch folders in a folder. Raises OutputError if one has other files, or cannot be removed."""
    for one in require_replaceable(folder, force=True):
        try:
            for path in one.iterdir():
                path.unlink()
            one.rmdir()
        except OSError as error:
            raise OutputError(f"cannot remove {error.filename}: {error.strerror}. Remove {one} yourself") from error


def _launches(folder: Path) -> list[Path]:
    """Return the launch folders in a folder: numbered, with a load test, its trace and the scenario."""
    numbered = [one for one in sorted(folder.glob("*")) if _NUMBERED.fullmatch(one.name) and one.is_dir()]
    return [one for one in numbered if not one.is_symlink() and all((one / name).is_file() for name in _ALWAYS)]


@dataclass(frozen=True)
class ScheduledEngines:
    """The engines that run an ExeGPT schedule, which ``title`` describes."""

    title: str
    prefill: Deployment  # the engine that runs the prefill, and the decode phases if ``decode`` is None
    decode: Deployment | None = None  # the engine that decodes
    pairs: int = 1  # number of such pairs
    phases: Mapping[str, Any] = field(default_factory=dict)  # for vLLM's scheduler; empty if it has no phases


def scheduled_scripts(engines: ScheduledEngines) -> dict[str, str]:
    """Return shell scripts by file name: of the engines, and of a router if prefill and decode are separate."""
    device = _device(engines.prefill)
    if engines.decode is None:
        plain = vllm_launch(engines.prefill, device=device)
        title = f"{engines.title}, phases kept by the gateway in front of it."
        scripts = {"vllm.sh": server_script(title, plain, engines.prefill)}
        if engines.phases:
            launch = phased_launch(engines.prefill, engines.phases, device=device)
            title = f"{engines.title}, phases kept inside vLLM."
            scripts["vllm-phases.sh"] = server_script(title, launch, engines.prefill)
        return scripts
    prefill, decode = split_launches(engines.prefill, engines.decode, device=device)
    prefill_gpus, decode_gpus = engines.prefill.parallel.gpus, engines.decode.parallel.gpus
    pair_gpus = prefill_gpus + decode_gpus
    pairs = min(engines.pairs, engines.prefill.node.gpus // pair_gpus)
    starts = range(0, pairs * pair_gpus, pair_gpus)
    note = "" if pairs == engines.pairs else f" Run it on each node: one holds {pairs} of {engines.pairs} pairs."
    prefill_sets = [range(start, start + prefill_gpus) for start in starts]
    decode_sets = [range(start + prefill_gpus, start + pair_gpus) for start in starts]
    prefill_channels, decode_channels = (range(first, first + pairs) for first in (PREFILL_CHANNEL, DECODE_CHANNEL))
    return {
        "prefill.sh": _part_script(
            f"{engines.title}: prefills.{note}", prefill, prefill_sets, PREFILL_PORT, prefill_channels
        ),
        "decode.sh": _part_script(
            f"{engines.title}: decodes.{note}", decode, decode_sets, DECODE_PORT, decode_channels
        ),
        "router.sh": _sides_router_script("vllm", pairs, pairs, "round_robin"),
    }


def _launches_of(d: Deployment) -> tuple[dict[str, tuple[Launch, ...]], dict[str, str]]:
    """Return the commands of each engine that can run a deployment, one for each part, and why others cannot.

    Raises InputError if none can.
    """
    launches, missing, device = dict[str, tuple[Launch, ...]](), dict[str, str](), _device(d)
    for key in (*(["trtllm"] if d.scheduler.trtllm is not None and d.decode is None else []), "vllm", "sglang"):
        try:
            if d.decode is None:
                port, launch = _first_port(d), _ENGINES[key].launch
                launches[key] = tuple(launch(side, port=port, device=device) for side in of_one_replica(d))
            elif key == "vllm":
                launches[key] = split_launches(*d.sides, device=device, notes=disaggregated_notes(d))
            else:
                launches[key] = sglang_split_launches(*d.sides, device=device)
        except InputError as error:
            missing[key] = str(error)
    if not launches:
        reasons = "; ".join(f"{_ENGINES[key].title}: {reason}" for key, reason in missing.items())
        raise InputError(f"no engine has a launch command for {d.name} ({degrees(d)}). {reasons}")
    return launches, missing


def _scripts_of_parts(d: Deployment, name: str) -> dict[str, str]:
    """Return by file name the scripts of both sides or of all groups, and of their router, for vLLM and SGLang."""
    parts = dict(zip(roles(d), d.sides, strict=True))
    is_one_node = shares_node(d)
    first, port, texts, ports = 0, PORT + 1, dict[str, str](), {"prefill": PREFILL_PORT, "decode": DECODE_PORT}
    gpu_sets: dict[str, list[range]] = {}
    for role, of in parts.items():
        width = min(replica_gpus(of), of.node.host_gpus)
        starts = range(first, first + _node_replicas(of) * width, width)
        gpu_sets[role] = [range(start, start + width) for start in starts]
        first = starts.stop if is_one_node else 0
        port = ports.setdefault(role, port) + len(starts)
    launches, _ = _launches_of(d)
    for engine, role, launch in ((e, r, one) for e, of in launches.items() for r, one in zip(parts, of, strict=True)):
        of, sets = parts[role], gpu_sets[role]
        what = role if d.groups else f"the {role} side"
        title = f"{name}: {d.name}, {what}, {degrees(of)}, on {of.hardware}."
        if not is_one_node:
            some = f"A node has {len(sets)} of its {of.parallel.replicas} replicas: run this on each node"
            all_here = len(sets) == of.parallel.replicas
            title += f" {'Run this on a node of its own' if all_here else some}, with HOST= its address."
        channel = PREFILL_CHANNEL if role == "prefill" else DECODE_CHANNEL
        # Each data-parallel rank of vLLM has a side channel, those of SGLang have one bootstrap server together.
        channel, channels = (BOOTSTRAP_PORT, 1) if engine == "sglang" else (channel, of.parallel.dp)
        of_side = None if d.groups else range(channel, channel + channels * len(sets), channels)
        texts[f"{engine}-{role}.sh"] = _part_script(title, launch, sets, ports[role], of_side)
    if d.groups:
        return texts | _gateway_files(d, gpu_sets, ports)
    policy, other = map(router_policy, parts.values())
    note = f"The decode side was behind a {other} router; the command has one policy for both sides."
    notes, (prefills, decodes) = (note,) if other != policy else (), map(len, gpu_sets.values())
    for engine in launches:
        texts[f"{engine}-router.sh"] = _sides_router_script(engine, prefills, decodes, policy, notes)
    return texts


def _gateway_files(d: Deployment, gpu_sets: Mapping[str, list[range]], ports: Mapping[str, int]) -> dict[str, str]:
    """Return the file of lengthwise's gateway in front of all groups, and the script that starts it."""
    urls = {}
    for role, side in zip(roles(d), d.sides, strict=True):
        count = len(gpu_sets[role])
        nodes = ["127.0.0.1" if shares_node(d) else f"{role}-node-{i // count}" for i in range(side.parallel.replicas)]
        urls[role] = [f"http://{node}:{ports[role] + i % count}" for i, node in enumerate(nodes)]
    body = f'{_HOST}\nexec lengthwise serve "$(dirname "$0")/{GATEWAY_FILE}" --host "$HOST"\n'
    note = (
        f"Install it: pip install 'lengthwise[gateway]'. It listens at HOST, port {PORT}, and {GATEWAY_FILE} has the "
        "addresses of the engines."
    )
    texts = {GATEWAY_FILE: gateway_toml(d, urls, host="127.0.0.1", admin_port=ADMIN_PORT)}
    return texts | {"router.sh": script("The router in front of all groups.", Launch((), notes=(note,)), body)}


def _sides_router_script(engine: str, prefills: int, decodes: int, policy: str, notes: tuple[str, ...] = ()) -> str:
    """Return the script of a router that sends each request to a prefill and a decode replica of this node."""
    switch = "--vllm-pd-disaggregation" if engine == "vllm" else "--pd-disaggregation"
    program = "vllm-router" if engine == "vllm" else "python3 -m sglang_router.launch_router"
    notes = (f"Install it: pip install {engine}-router. It listens at HOST, port {PORT}, where requests go.", *notes)
    urls = [
        [f"http://127.0.0.1:{port + i}" for i in range(count)]
        for count, port in ((prefills, PREFILL_PORT), (decodes, DECODE_PORT))
    ]
    bootstrap = ""
    if engine == "sglang":
        urls[0] = [f"{url}@{BOOTSTRAP_PORT + i}" for i, url in enumerate(urls[0])]
        bootstrap = ' "${url#*@}"'
        notes += ("An address of PREFILLS ends with @ and the engine's bootstrap port.",)
    body = (
        f"{_HOST}PREFILLS=${{PREFILLS:-'{' '.join(urls[0])}'}}\nDECODES=${{DECODES:-'{' '.join(urls[1])}'}}\n\nset --\n"
        f'for url in $PREFILLS; do\n  set -- "$@" --prefill "${{url%@*}}"{bootstrap}\ndone\n'
        'for url in $DECODES; do\n  set -- "$@" --decode "$url"\ndone\n'
        f'exec {program} --host "$HOST" --port {PORT} {switch} --policy {policy} "$@"\n'
    )
    title = "The router in front of both sides; PREFILLS and DECODES list the addresses of their replicas."
    return script(title, Launch((program,), notes=notes), body)


def _part_script(title: str, launch: Launch, gpu_sets: Sequence[range], port: int, channels: range | None) -> str:
    """Return a script that starts the replicas of a side or group on a node.

    A replica of a side transfers KV cache through the ports from its item of ``channels`` on. Groups have none.
    """
    replaced = {"serve": '"$MODEL"', "--model-path": '"$MODEL"', "--host": '"$HOST"', "--port": '"$2"'}
    replaced["--disaggregation-bootstrap-port"] = '"$3"'
    command = invocation(launch.command, replaced, "  ")
    head = default_model(_model_of(launch.command)) + _HOST
    variables = {"CUDA_VISIBLE_DEVICES": "$1"}
    if "--model-path" not in launch.command and channels is not None:
        variables |= {"VLLM_NIXL_SIDE_CHANNEL_PORT": "$3", "VLLM_NIXL_SIDE_CHANNEL_HOST": "$HOST"}
    serve = (
        f"# serve GPUS PORT{' CHANNEL' if channels is not None else ''}\nserve() {{\n"
        f"  {' '.join(f'{name}={value}' for name, value in variables.items())}\n"
        f"  export {' '.join(variables)}\n"
        f"  exec {command}\n}}\n"
    )
    last = [""] * len(gpu_sets) if channels is None else [f" {channel}" for channel in channels]
    calls = [f"serve {','.join(map(str, gpus))} {port + i}{last[i]}" for i, gpus in enumerate(gpu_sets)]
    if len(calls) == 1:
        start = f"{calls[0]}\n"
    else:
        background = "".join(f'{call} &\npids="$pids $!"\n' for call in calls)
        start = f"pids=\n{_STOP}{background}wait\n"
    return script(title, launch, f"{head}\n{serve}\n{start}")
