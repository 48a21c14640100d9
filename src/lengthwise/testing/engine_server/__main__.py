"""Emulated engines as a process: prints one JSON line with their addresses when they listen."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from lengthwise.schema.errors import LengthwiseError
from lengthwise.testing.engine_server.engine import KINDS, EngineSpec, Limits, LinearSteps
from lengthwise.testing.engine_server.request_handler import FaultPlan, read_plan
from lengthwise.testing.engine_server.server import EngineServer


def main() -> None:
    """Serves until SIGTERM or SIGINT."""
    try:
        args = _arguments()
        asyncio.run(_serve(_spec(args), args))
    except LengthwiseError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lengthwise.testing.engine_server",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    own, limits, steps = EngineSpec(), Limits(), LinearSteps()
    parser.add_argument("--host", default="127.0.0.1", help="where to listen")
    parser.add_argument("--port", type=int, default=0, help="the first engine's; 0 picks free ones")
    parser.add_argument("--count", type=int, default=1, help="engines, on ports that follow each other")
    parser.add_argument("--model", default=own.model, help="name, and with it every answer")
    parser.add_argument("--kind", default=own.kind, choices=KINDS, help="whose routes and metrics")
    parser.add_argument("--speed", type=float, default=own.speed, help="engine seconds in a real one")
    parser.add_argument("--max-model-len", type=int, default=own.max_model_len)
    parser.add_argument("--mean-tokens", type=int, default=own.mean_tokens, help="of answers that nothing fixes")
    parser.add_argument("--max-num-seqs", type=int, default=limits.max_num_seqs)
    parser.add_argument("--max-num-batched-tokens", type=int, default=limits.max_num_batched_tokens)
    parser.add_argument("--num-blocks", type=int, default=limits.num_blocks, help="of 16 KV tokens")
    parser.add_argument("--max-num-queued-reqs", type=int, default=None, help="more that wait are 503")
    parser.add_argument("--priority", action="store_true", help="by priority, else first come first served")
    parser.add_argument("--fixed-s", type=float, default=steps.fixed_s, help="of each step")
    parser.add_argument("--decode-s", type=float, default=steps.decode_s, help="of each decode in a step")
    parser.add_argument("--prompt-token-s", type=float, default=steps.prompt_token_s)
    parser.add_argument("--api-key", default=None)
    parser.add_argument("--faults", type=Path, default=None, help="a plan of faults as JSON")
    return parser.parse_args()


def _spec(args: argparse.Namespace) -> EngineSpec:
    return EngineSpec(
        model=args.model,
        kind=args.kind,
        limits=Limits(
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            num_blocks=args.num_blocks,
            max_num_queued_reqs=args.max_num_queued_reqs,
            by_priority=args.priority,
        ),
        steps=LinearSteps(args.fixed_s, args.decode_s, args.prompt_token_s),
        speed=args.speed,
        max_model_len=args.max_model_len,
        mean_tokens=args.mean_tokens,
        api_key=args.api_key,
    )


async def _serve(spec: EngineSpec, args: argparse.Namespace) -> None:
    over = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    async with AsyncExitStack() as stack:
        servers = [_server(spec, args, i) for i in range(args.count)]
        for server in servers:
            await stack.enter_async_context(server)
        sys.stdout.write(json.dumps({"urls": [server.url for server in servers], "pid": os.getpid()}) + "\n")
        sys.stdout.flush()
        await over.wait()


def _server(spec: EngineSpec, args: argparse.Namespace, number: int) -> EngineServer:
    plan = FaultPlan() if args.faults is None else read_plan(json.loads(args.faults.read_text("utf-8")))
    port = args.port + number if args.port else 0
    server = EngineServer(spec, host=args.host, port=port, faults=plan)
    server.dies_hard = lambda: os._exit(137)
    return server


if __name__ == "__main__":
    main()
