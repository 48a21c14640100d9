"""``lengthwise ui``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

EXAMPLES = """\b
Examples:
  lengthwise ui
  lengthwise ui --port 8131 --host 0.0.0.0
  lengthwise ui --run run
  lengthwise ui --gateway http://127.0.0.1:8001
"""


def run(
    host: Annotated[str, Option(help="Address. One that other machines reach needs the printed token.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port; 0: a free one.")] = 8130,
    runs: Annotated[
        list[Path] | None,
        Option("--run", metavar="DIR", help="Show the progress of the app run in this folder; repeatable."),
    ] = None,
    gateways: Annotated[
        list[str] | None,
        Option("--gateway", metavar="URL", help="Show the gateway with this admin address; repeatable."),
    ] = None,
) -> None:
    """Open a planner in the browser: plan a deployment, search for GPUs, compare schedulers."""
    from lengthwise.cli import mcp
    from lengthwise.config.files import allow_only, examples_folder
    from lengthwise.ui import applications, gateway, server, studies

    plan = applications.planner(examples_folder())
    tools = (mcp.simulate, mcp.capacity, mcp.search, mcp.explain, mcp.compare, plan, mcp.catalog)
    own = (applications.page(examples_folder(), runs or ()), gateway.page(gateways or ()), studies.PAGE)
    allow_only(examples_folder())  # settings of browsers must not read other files
    server.serve(host, port, None if host in server.LOOPBACK else server.new_token(), tools, (*server.PAGES, *own))
