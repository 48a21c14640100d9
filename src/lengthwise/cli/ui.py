"""``lengthwise ui``."""

from __future__ import annotations

from typing import Annotated

from typer import Option

EXAMPLES = """\b
Examples:
  lengthwise ui
  lengthwise ui --port 8131 --host 0.0.0.0
"""


def run(
    host: Annotated[str, Option(help="Address. One that other machines reach needs the printed token.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port; 0: a free one.")] = 8130,
) -> None:
    """Open a planner in the browser: plan a deployment, search for GPUs, compare schedulers."""
    from lengthwise.cli import mcp
    from lengthwise.ui import server

    tools = (mcp.simulate, mcp.capacity, mcp.search, mcp.explain, mcp.compare, mcp.catalog)
    server.serve(host, port, None if host in server.LOOPBACK else server.new_token(), tools)
