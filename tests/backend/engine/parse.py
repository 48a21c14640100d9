"""What vLLM's own parsers make of command lines: a JSON list of them in, a JSON list of answers out.

An answer is {"error": text} or {"taken": {argument: value}}. A ``vllm serve`` line also goes through
the checks of vLLM's scheduler and cache; neither needs a GPU or a model.
"""

import contextlib
import io
import json
import sys


def serve_parser():
    """The parser of ``vllm serve``, which vLLM 0.33 moved."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser
    except ImportError:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    return make_arg_parser(FlexibleArgumentParser())


def bench_parser():
    """The parser of ``vllm bench serve``."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    return parser


def check(args):
    """Raises what vLLM raises of a scheduler, a cache or a quantisation it does not take."""
    from vllm.config import CacheConfig, SchedulerConfig
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    given = {"max_num_seqs", "max_num_batched_tokens", "watermark"}
    SchedulerConfig(
        max_model_len=args.max_model_len,
        is_encoder_decoder=False,
        enable_chunked_prefill=args.enable_chunked_prefill is not False,
        policy=args.scheduling_policy,
        **{name: getattr(args, name) for name in given},
    )
    CacheConfig(
        block_size=args.block_size,
        cache_dtype=args.kv_cache_dtype,
        gpu_memory_utilization=args.gpu_memory_utilization,
        num_gpu_blocks_override=args.num_gpu_blocks_override,
    )
    if args.quantization is not None and args.quantization not in QUANTIZATION_METHODS:
        raise ValueError(f"no quantization {args.quantization}")


def answer(parsers, command):
    """What the parser, and for a server the checks, say to one command line."""
    is_bench = command[1] == "bench"
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message):
            args = parsers[is_bench].parse_args(command[3 if is_bench else 2 :])
            if not is_bench:
                check(args)
    except (SystemExit, ValueError) as error:
        return {"error": f"{error} {message.getvalue()}"}
    return {"taken": {k: v for k, v in vars(args).items() if isinstance(v, str | int | float | bool)}}


if __name__ == "__main__":
    parsers = (serve_parser(), bench_parser())
    answers = [answer(parsers, command) for command in json.load(sys.stdin)]
    print("ANSWERS" + json.dumps(answers))
