"""The scripts of a launch folder: servers, router, load test."""

from __future__ import annotations

import shlex

from lengthwise.backend._differences import router_policy
from lengthwise.backend._shell import comment, default_model, exports, invocation, script
from lengthwise.backend.launch import Launch, fits_node, replica_gpus, visible_gpus
from lengthwise.schema.deployment import Deployment

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


def _several_nodes(d: Deployment, here: int) -> str:
    text = f"A node holds {here} of the {d.parallel.replicas} replicas: run this on each node, with HOST=0.0.0.0."
    return comment(text) + "\n"


def router_script(deployment: Deployment) -> str:
    """A router before several replicas, with the policy that stands nearest to the simulated one."""
    first = first_port(deployment)
    urls = [f"http://127.0.0.1:{first + replica}" for replica in range(_replicas_of_a_node(deployment))]
    command = (
        "vllm-router",
        "--host",
        "127.0.0.1",
        "--port",
        str(PORT),
        "--policy",
        router_policy(deployment),
    )
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
