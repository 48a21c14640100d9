"""``lengthwise profile run``: this machine's device, measured."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from lengthwise.schema.errors import InputError

EXAMPLES = """\b
Examples:
  lengthwise profile run --model llama-3-8b --tp 1,2,4 --out h100.parquet
  lengthwise profile run --model ./my-model/config.json --device cpu --threads 8 --budget 10m
  lengthwise profile run --model llama-3-8b --out h100.parquet --resume
"""

_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def run(
    *,
    model: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="A model of the catalog, or its config.json.")
    ],
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto: a GPU where there is one.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float16, float32; auto: float32 on a CPU, the model's on a GPU.")
    ] = "auto",
    tp: Annotated[str, typer.Option(metavar="N,N...", help="TP degrees whose shards are measured.")] = "1",
    budget: Annotated[str, typer.Option(metavar="TIME", help="How long in all: 300, 90s, 5m, 1h.")] = "5m",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The profile; else NAME-DEVICE.parquet here.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was interrupted.")] = False,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of the largest step.")] = None,
    max_seqs: Annotated[int | None, typer.Option(min=1, help="Sequences of the largest step.")] = None,
    max_context: Annotated[int | None, typer.Option(min=1, help="Tokens of the longest request.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of a CPU; else all cores.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of what the tensors hold.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Measure a model's operators on this machine with torch, and write one profile.

    Points are spent where they tell most until the time is up. Needs no weights: shapes are enough. What
    was measured is kept beside the profile as it comes; --resume goes on with it.
    """
    from lengthwise.cli import _profile_run_page as page

    page.run(
        model, device=device, dtype=dtype, tp=_degrees(tp), budget_s=_seconds(budget), out=out, resume=resume,
        max_tokens=max_tokens, max_seqs=max_seqs, max_context=max_context, threads=threads, seed=seed,
        quiet=quiet,
    )  # fmt: skip


def _degrees(text: str) -> tuple[int, ...]:
    try:
        degrees = tuple(int(word) for word in text.split(","))
    except ValueError:
        degrees = ()
    if not degrees or min(degrees) < 1:
        raise InputError(
            f"--tp must be whole numbers from 1, with commas between, such as 1,2,4; it is {text!r}"
        )
    return degrees


def _seconds(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|m|min|h|)\s*", text)
    if match is None or not float(match[1]):
        raise InputError(f"--budget must be a time above 0 such as 300, 90s, 5m or 1h; it is {text!r}")
    return float(match[1]) * _UNITS_S[match[2]]
