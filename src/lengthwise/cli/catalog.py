"""``lengthwise catalog``: what is known by name."""

from __future__ import annotations

from typing import Annotated

import typer

# \b keeps the lines below it as they are.
EXAMPLES = """\b
Examples:
  lengthwise catalog gpus
  lengthwise catalog models llama-2-70b
"""
KINDS = ("models", "gpus", "nodes", "policies", "workloads")


def _kinds(incomplete: str) -> list[str]:
    return [kind for kind in KINDS if kind.startswith(incomplete)]


def _names(context: typer.Context, incomplete: str) -> list[str]:
    from lengthwise.cli import _catalog_pages as pages

    known = pages.names(context.params.get("kind") or "")
    return [name for name in known if name.startswith(incomplete)]


def run(
    kind: Annotated[
        str | None,
        typer.Argument(
            help=f"One of: {', '.join(KINDS)}. Without it: how many of each.", autocompletion=_kinds
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Argument(help="One entry, with its numbers and sources.", autocompletion=_names)
    ] = None,
) -> None:
    """Show the known models, GPUs, nodes, policies and workloads."""
    from lengthwise.cli import _catalog_pages as pages

    if kind is None:
        pages.overview()
    elif name is None:
        pages.listing(kind)
    else:
        pages.entry(kind, name)
