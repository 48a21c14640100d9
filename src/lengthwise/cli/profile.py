"""``lengthwise profile``: what was measured of operators on a device."""

from __future__ import annotations

import typer

from lengthwise.cli import profile_run

EXAMPLES = """\b
Examples:
  lengthwise profile import llmservingsim RTXPRO6000/meta-llama/Llama-3.1-8B/bf16 --out pro6000.parquet
  lengthwise profile show pro6000.parquet --report pro6000.html
  lengthwise profile check new.parquet old.parquet
"""

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Measure, import, look at and compare the times of operators.",
    epilog=EXAMPLES,
)


@app.callback()
def _profile() -> None:
    """Keeps its commands beside each other, however many there are."""


app.command("run", epilog=profile_run.EXAMPLES)(profile_run.run)
