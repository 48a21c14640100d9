"""What vLLM's own parser makes of servers that keep a schedule: a JSON list of commands in, of answers out."""

import json
import sys

from parse import serve_parser


def answer(parser, command):
    """The class, its settings and the transfer of one command line, or what vLLM raises."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        args = parser.parse_args(command[2:])
    except (SystemExit, ValueError) as error:
        return {"error": str(error)}
    transfer = args.kv_transfer_config
    return {
        "scheduler_cls": args.scheduler_cls,
        "additional_config": args.additional_config,
        "connector": transfer and transfer.kv_connector,
        "role": transfer and transfer.kv_role,
        "known": sorted(KVConnectorFactory._registry),  # noqa: SLF001 - vLLM lists its connectors nowhere else
    }


if __name__ == "__main__":
    parser = serve_parser()
    print("ANSWERS" + json.dumps([answer(parser, command) for command in json.load(sys.stdin)]))
