"""Serve emulated engines as a process; print their addresses as one JSON line once they listen."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from lengthwise.engine.continuous_batching import Limits
from lengthwise.schema.errors import LengthwiseError
from lengthwise.testing.engine_server.engine import KINDS, EngineSpec, LinearSteps
from lengthwise.testing.engine_server.request_handler import FaultPlan, parse_faults
from lengthwise.testing.engine_server.server import EngineServer


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    spec, limits, steps = EngineSpec(), Limits(), LinearSteps()
    parser = argparse.ArgumentParser(
        prog="python -m lengthwise.testing.engine_server",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=0, help="of the first engine; 0 picks free ones")
    add("--count", type=int, default=1, help="engines, on consecutive ports")
    add("--model", default=spec.model, help="model name; seeds the generated text")
    add("--kind", default=spec.kind, choices=KINDS, help="engine whose routes and metrics are served")
    add("--speed", type=float, default=spec.speed, help="engine seconds per real second")
    add("--max-model-len", type=int, default=spec.max_model_len)
    add("--mean-tokens", type=int, default=spec.mean_tokens, help="of outputs whose length no request fixes")
    add("--max-num-seqs", type=int, default=limits.max_num_seqs)
    add("--max-num-batched-tokens", type=int, default=limits.max_num_batched_tokens)
    add("--num-blocks", type=int, default=limits.num_blocks, help="of 16 KV tokens")
    add("--max-num-queued-reqs", type=int, default=None, help="further requests get 503")
    add("--priority", action="store_true", help="schedule by priority, else first come first served")
    add("--fixed-s", type=float, default=steps.fixed_s, help="of each step")
    add("--decode-s", type=float, default=steps.decode_s, help="of each decode in a step")
    add("--prompt-token-s", type=float, default=steps.prompt_token_s)
    add("--api-key", default=None)
    add("--faults", type=Path, default=None, help="a JSON file with a fault plan")
    args = parser.parse_args()
    try:
        names = ("max_num_seqs", "max_num_batched_tokens", "num_blocks", "max_num_queued_reqs")
        limits = Limits(**{name: getattr(args, name) for name in names}, by_priority=args.priority)
        steps = LinearSteps(args.fixed_s, args.decode_s, args.prompt_token_s)
        fields = ("model", "kind", "speed", "max_model_len", "mean_tokens", "api_key")
        spec = EngineSpec(**{name: getattr(args, name) for name in fields}, limits=limits, steps=steps)
        asyncio.run(_serve(spec, args))
    except LengthwiseError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None


async def _serve(spec: EngineSpec, args: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        servers = []
        for i in range(args.count):
            faults = FaultPlan() if args.faults is None else parse_faults(json.loads(args.faults.read_text("utf-8")))
            port = args.port + i if args.port else 0
            servers.append(server := EngineServer(spec, host=args.host, port=port, faults=faults))
            server.exit_process = lambda: os._exit(137)
            await stack.enter_async_context(server)
        sys.stdout.write(json.dumps({"urls": [server.url for server in servers], "pid": os.getpid()}) + "\n")
        sys.stdout.flush()
        await stop.wait()


if __name__ == "__main__":
    main()
