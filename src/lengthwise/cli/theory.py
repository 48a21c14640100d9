"""``lengthwise theory``: what can be said without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """\b
Examples:
  lengthwise theory multibin --batch 8 --bins 1,2,4,8,16,32 --uniform 1 20 --target 0.95
  lengthwise theory multibin --lengths chat-1m --rate 2 --report bins.html
  lengthwise theory queue --lengths chat-1m --slots 8 --load 0.5..0.95 --error 0.5
"""

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Formulas: what bins and what knowing lengths are worth.",
    epilog=EXAMPLES,
)

Uniform = Annotated[
    tuple[float, float] | None,
    typer.Option(metavar="LOW HIGH", help="Service times uniform between two, seconds."),
]
Exponential = Annotated[
    float | None, typer.Option(metavar="RATE", help="Service times exponential, 1 / mean seconds.")
]
Lengths = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|NAME",
        help="Output tokens of a trace or log, of a .txt file of numbers, or of a preset; times are linear in them.",
    ),
]
TokenTime = Annotated[float, typer.Option(metavar="SECONDS", help="With --lengths: of a token.")]
FixedTime = Annotated[float, typer.Option(metavar="SECONDS", help="With --lengths: of a request.")]
Report = Annotated[Path | None, typer.Option(help="Write a self-contained HTML report to this file.")]
Json = Annotated[
    Path | None,
    typer.Option(help="Write all numbers to this file; -: to standard output, without the table."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no table.")]


@app.command(epilog=EXAMPLES)
def multibin(
    *,
    batch: Annotated[int, typer.Option(help="Requests in a batch.")] = 8,
    bins: Annotated[str, typer.Option(metavar="K,K,...", help="Numbers of bins.")] = "1,2,4,8,16,32",
    uniform: Uniform = None,
    exponential: Exponential = None,
    lengths: Lengths = None,
    token_time: TokenTime = 0.02,
    fixed_time: FixedTime = 0.0,
    boundaries: Annotated[
        str, typer.Option(help="optimal (proven, or learned for other lengths), equal masses, or learned.")
    ] = "optimal",
    rate: Annotated[float | None, typer.Option(help="Arrivals, requests a second: for latencies.")] = None,
    target: Annotated[
        float | None, typer.Option(metavar="SHARE", help="How many bins reach this share of the capacity?")
    ] = None,
    error: Annotated[float, typer.Option(help="Chance of each neighbouring bin, 0 to 0.5.")] = 0.0,
    accuracy: Annotated[
        list[str] | None,
        typer.Option(metavar="K=SHARE", help="Right bins of a predictor at K bins: 4=0.63; repeatable."),
    ] = None,
    requests: Annotated[
        int, typer.Option(min=0, help="Requests a simulated run; 0 simulates nothing.")
    ] = 20_000,
    seeds: Annotated[int, typer.Option(min=1, help="Simulated runs.")] = 5,
    report: Report = None,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Show throughput, latency and boundaries by number of bins (Multi-Bin Batching), simulation beside them."""
    from lengthwise import theory
    from lengthwise.cli import _theory_page as page

    page.require(report, json)
    times, facts = page.times(uniform, exponential, lengths, token_time, fixed_time)
    study = theory.multibin_study(
        times,
        batch,
        page.whole_numbers("--bins", bins),
        rule=boundaries,
        rate_rps=page.or_nan(rate),
        target_share=page.or_nan(target),
        error=error,
        accuracy=page.shares("--accuracy", accuracy),
        requests=requests,
        seeds=seeds,
        curves=report is not None,
        facts=[
            *facts,
            f"batches of {batch}",
            f"{boundaries} boundaries",
            *page.wrong(error, accuracy),
            *page.arriving(rate),
        ],
    )
    page.tell(study, report=report, json=json, quiet=quiet)


@app.command(epilog=EXAMPLES)
def queue(
    *,
    load: Annotated[
        str, typer.Option(metavar="SHARES", help="Busy shares of a slot: 0.5,0.9 or 0.5..0.95.")
    ] = "0.5..0.95",
    slots: Annotated[int, typer.Option(help="Requests that are served at a time.")] = 1,
    uniform: Uniform = None,
    exponential: Exponential = None,
    lengths: Lengths = None,
    token_time: TokenTime = 0.02,
    fixed_time: FixedTime = 0.0,
    error: Annotated[
        float, typer.Option(help="Of the predictor: standard deviation of ln(predicted / true).")
    ] = 0.5,
    pairs: Annotated[
        Path | None,
        typer.Option(
            help="A predictor's own answers instead: true and predicted tokens, two numbers a line."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the errors' order.")] = 0,
    report: Report = None,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Show what knowing lengths, or guessing them, is worth at a load (M/G/1: FCFS, SJF, SRPT, predicted)."""
    from lengthwise import theory
    from lengthwise.cli import _theory_page as page

    page.require(report, json)
    own = page.pairs_of(pairs, token_time, fixed_time)
    if own is not None:
        page.alone("--pairs", uniform, exponential, lengths)
        times: theory.ServiceTimes = theory.SampledTimes(own[0])
        facts = [f"{len(own[0]):,} predictions of {pairs}"]
    else:
        times, facts = page.times(uniform, exponential, lengths, token_time, fixed_time)
        facts = [*facts, f"prediction error {error:g}"]
    study = theory.queue_study(
        times,
        page.loads(load),
        sigma=error,
        slots=slots,
        pairs=own,
        seed=seed,
        facts=[*facts, "1 slot" if slots == 1 else f"{slots} slots"],
    )
    page.tell(study, report=report, json=json, quiet=quiet)
