"""The scripts of engines that split encoding and decoding: both sides, and the router before them."""

from __future__ import annotations

import shlex

from lengthwise.backend._scripts import PORT
from lengthwise.backend._shell import default_model, invocation, script
from lengthwise.backend.launch import Launch

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
