"""``lengthwise predict``: train, evaluate and look at predictors of output length."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """\b
Examples:
  lengthwise predict show default --prompt "Write an essay about rivers."
  lengthwise predict train log.jsonl --out mine.lwp
  lengthwise predict eval mine.lwp other-models.jsonl --report lengths.html
"""

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Train, evaluate and look at predictors of output length.",
    epilog=EXAMPLES,
)

_FILES = typer.Argument(
    metavar="FILE...", help="JSONL, CSV or Parquet of requests with outputs, or a serving log."
)
_MODEL = typer.Option("--model", help="Name of the model where the rows do not tell it.")


@app.command(epilog=EXAMPLES)
def train(
    files: Annotated[list[Path], _FILES],
    *,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the predictor goes, usually NAME.lwp.")],
    kind: Annotated[
        str, typer.Option(help="lexical, encoder, ecdf, buckets or constant.", metavar="KIND")
    ] = "lexical",
    test_share: Annotated[
        float, typer.Option(min=0.0, max=0.9, help="Share of the prompts that is held out and reported on.")
    ] = 0.2,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the split and of the training.")] = 0,
    conformal: Annotated[
        bool, typer.Option("--conformal", help="Move its quantiles to where held-out lengths fall.")
    ] = False,
    model: Annotated[str | None, _MODEL] = None,
) -> None:
    """Train a predictor, report on prompts held out of the training, and write it to a file."""
    from lengthwise.cli import _predict_page as page

    page.train(files, out, kind=kind, test_share=test_share, seed=seed, conformal=conformal, model=model)


@app.command("eval", epilog=EXAMPLES)
def evaluate(
    predictor: Annotated[
        str, typer.Argument(metavar="PREDICTOR", help="A file of `predict train`, or default.")
    ],
    files: Annotated[list[Path], _FILES],
    *,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write an HTML page.")] = None,
    json_: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write all numbers as JSON; - is standard output."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the intervals.")] = 0,
    model: Annotated[str | None, _MODEL] = None,
) -> None:
    """Evaluate a predictor on samples that it has not seen, overall and file by file."""
    from lengthwise.cli import _predict_page as page

    page.evaluate(predictor, files, report=report, json_file=json_, seed=seed, model=model)


@app.command(epilog=EXAMPLES)
def collect(
    prompts: Annotated[
        Path, typer.Argument(metavar="FILE", help="Prompts: JSONL, CSV, Parquet, or text, one a line.")
    ],
    *,
    url: Annotated[str, typer.Option(help="An OpenAI-compatible server, such as http://localhost:8000/v1.")],
    model: Annotated[str, typer.Option(help="The model's name there.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="JSONL that answers are appended to.")],
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Limit of an output.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="Of the sampling.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 8,
) -> None:
    """Ask a running server for the answers to prompts, to train on; goes on where it was interrupted.

    A key is taken from the environment variable OPENAI_API_KEY, where there is one.
    """
    from lengthwise.cli import _predict_page as page

    page.collect(
        prompts, url=url, model=model, out=out, max_tokens=max_tokens, temperature=temperature,
        concurrency=concurrency,
    )  # fmt: skip


@app.command(epilog=EXAMPLES)
def show(
    predictor: Annotated[
        str, typer.Argument(metavar="PREDICTOR", help="A file of `predict train`, or default.")
    ] = "default",
    *,
    prompt: Annotated[str | None, typer.Option(help="Show the distribution of this prompt's answer.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Who will answer the prompt.")] = None,
    tokens_so_far: Annotated[int, typer.Option(min=0, help="Tokens that have come already.")] = 0,
) -> None:
    """Show what a predictor is and was trained on, or what it says of a prompt."""
    from lengthwise.cli import _predict_page as page

    if prompt is None:
        page.show_card(predictor)
    else:
        page.show_prompt(predictor, prompt, model, tokens_so_far)
