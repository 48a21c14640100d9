"""``lengthwise theory``: what can be said without an engine."""

from __future__ import annotations

import json as json_format
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from lengthwise import theory
from lengthwise.cli import outputs
from lengthwise.cli.tables import console, duration, print_table, two_digits
from lengthwise.report.theory import answers, cuts_text, theory_facts, write_theory_html
from lengthwise.schema.errors import InputError
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.files import write_whole
from lengthwise.theory import MultiBinStudy, QueueStudy, ServiceTimes

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
    tuple[float, float] | None, typer.Option(metavar="LOW HIGH", help="Service times uniform between two, seconds.")
]
Exponential = Annotated[float | None, typer.Option(metavar="RATE", help="Service times exponential, 1 / mean seconds.")]
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
    Path | None, typer.Option(help="Write all numbers to this file; -: to standard output, without the table.")
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
    requests: Annotated[int, typer.Option(min=0, help="Requests a simulated run; 0 simulates nothing.")] = 20_000,
    seeds: Annotated[int, typer.Option(min=1, help="Simulated runs.")] = 5,
    report: Report = None,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Show throughput, latency and boundaries by number of bins (Multi-Bin Batching), simulation beside them."""
    from lengthwise import theory

    require(report, json)
    times, metadata = service_times(uniform, exponential, lengths, token_time, fixed_time)
    study = theory.multibin_study(
        times,
        batch,
        whole_numbers("--bins", bins),
        rule=boundaries,
        rate_rps=or_nan(rate),
        target_share=or_nan(target),
        error=error,
        accuracy=shares("--accuracy", accuracy),
        requests=requests,
        seeds=seeds,
        curves=report is not None,
        metadata=[
            *metadata,
            f"batches of {batch}",
            f"{boundaries} boundaries",
            *wrong(error, accuracy),
            *arriving(rate),
        ],
    )
    tell(study, report=report, json=json, quiet=quiet)


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
    error: Annotated[float, typer.Option(help="Of the predictor: standard deviation of ln(predicted / true).")] = 0.5,
    pairs: Annotated[
        Path | None,
        typer.Option(help="A predictor's own answers instead: true and predicted tokens, two numbers a line."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the errors' order.")] = 0,
    report: Report = None,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Show what knowing lengths, or guessing them, is worth at a load (M/G/1: FCFS, SJF, SRPT, predicted)."""
    from lengthwise import theory

    require(report, json)
    own = pairs_of(pairs, token_time, fixed_time)
    if own is not None:
        alone("--pairs", uniform, exponential, lengths)
        times: theory.ServiceTimes = theory.SampledTimes(own[0])
        metadata = [f"{len(own[0]):,} predictions of {pairs}"]
    else:
        times, metadata = service_times(uniform, exponential, lengths, token_time, fixed_time)
        metadata = [*metadata, f"prediction error {error:g}"]
    study = theory.queue_study(
        times,
        loads(load),
        sigma=error,
        slots=slots,
        pairs=own,
        seed=seed,
        metadata=[*metadata, "1 slot" if slots == 1 else f"{slots} slots"],
    )
    tell(study, report=report, json=json, quiet=quiet)


Floats = npt.NDArray[np.float64]

UNKNOWN = "\N{EN DASH}"
DRAWN = 20_000
"""Requests drawn from a preset."""
POINTS = 10
"""Loads of a range."""


def require(report: Path | None, json: Path | None) -> None:
    """Raises InputError where what was asked for could not be written."""
    outputs.require_writable([path for path in (json if json != outputs.STDOUT else None, report) if path is not None])
    if report is not None:
        outputs.require_plotly()


def service_times(
    uniform: tuple[float, float] | None,
    exponential: float | None,
    lengths: str | None,
    token_time: float,
    fixed_time: float,
) -> tuple[ServiceTimes, list[str]]:
    """The service times that were asked for, and what they are, in words."""
    given = [name for name, value in _named(uniform, exponential, lengths) if value is not None]
    if len(given) != 1:
        came = " and ".join(given) or "none of them"
        raise InputError(
            f"service times come from one of --uniform LOW HIGH, --exponential RATE, --lengths FILE; came: {came}"
        )
    if uniform is not None:
        return theory.UniformTimes(*uniform), [f"service uniform, {uniform[0]:g} to {uniform[1]:g} s"]
    if exponential is not None:
        made = theory.ExponentialTimes(exponential)
        return made, [f"service exponential, mean {duration(made.mean_s)}"]
    tokens = _tokens(str(lengths))
    words = f"{len(tokens):,} lengths of {lengths}, mean {tokens.mean():.4g} tokens"
    return theory.SampledTimes(_seconds(tokens, token_time, fixed_time)), [words, f"{token_time:g} s a token"]


def alone(option: str, *others: Any) -> None:
    """Raises InputError where an option came together with those it replaces."""
    if any(other is not None for other in others):
        raise InputError(f"{option} brings its own lengths; leave --uniform, --exponential and --lengths out")


def pairs_of(path: Path | None, token_time: float, fixed_time: float) -> tuple[Floats, Floats] | None:
    """True and predicted service times from a file of two numbers a line; None without one."""
    if path is None:
        return None
    table = _numbers(path)
    if table.shape[1] != 2:
        raise InputError(f"{path} must hold true and predicted tokens, two numbers a line; it holds {table.shape[1]}")
    if not (np.isfinite(table).all() and (table[:, 0] > 0).all() and (table[:, 1] >= 0).all()):
        raise InputError(f"{path} must hold finite tokens, true ones above 0 and predicted ones at least 0")
    return _seconds(table[:, 0], token_time, fixed_time), _seconds(table[:, 1], token_time, fixed_time)


def whole_numbers(option: str, text: str) -> list[int]:
    """Numbers between commas."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{option} takes whole numbers between commas, such as 1,2,4; it is {text!r}") from None


def loads(text: str) -> list[float]:
    """Shares between commas, or a range LOW..HIGH in equal steps."""
    try:
        low, dots, high = text.partition("..")
        if dots:
            return [float(f"{x:.6g}") for x in np.linspace(float(low), float(high), POINTS)]
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--load takes 0.5,0.9 or a range 0.5..0.95; it is {text!r}") from None


def shares(option: str, texts: Sequence[str] | None) -> dict[int, float]:
    """{K: SHARE} of "K=SHARE"."""
    try:
        return {int(key): float(value) for key, value in (text.split("=") for text in texts or ())}
    except ValueError:
        raise InputError(f"{option} takes K=SHARE, such as 4=0.63; it is {' '.join(texts or ())!r}") from None


def wrong(error: float, accuracy: Sequence[str] | None) -> list[str]:
    """How bins are mistaken, in words; nothing where they are not."""
    told = [f"right bins {', '.join(accuracy)}"] if accuracy else []
    return told + ([f"neighbouring bins with probability {error:g} each"] if error else [])


def arriving(rate: float | None) -> list[str]:
    """The arrival rate in words; nothing where there is none."""
    return [] if rate is None else [f"{rate:g} requests a second"]


def or_nan(value: float | None) -> float:
    """NaN stands for what was not asked for."""
    return math.nan if value is None else value


def tell(study: MultiBinStudy | QueueStudy, *, report: Path | None, json: Path | None, quiet: bool) -> None:
    """Prints the table and the answer, and writes the files that were asked for."""
    alone_on_stdout = json is not None and str(json) == "-"
    if not quiet and not alone_on_stdout:
        _show(study)
    if json is not None:
        text = json_format.dumps(theory_facts(study), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        typer.echo(text, nl=False) if alone_on_stdout else write_whole(json, text.encode())
    if report is not None:
        write_theory_html(report, study)
    for path in (json, report):
        if path is not None and str(path) != "-" and not quiet:
            typer.echo(f"wrote {path}", err=True)


def _show(study: MultiBinStudy | QueueStudy) -> None:
    out = console()
    out.print(", ".join(study.metadata), style="dim", highlight=False)
    if isinstance(study, MultiBinStudy):
        _show_bins(study)
    else:
        _show_queue(study)
    for line in answers(study):
        out.print(line, highlight=False)


def _show_bins(study: MultiBinStudy) -> None:
    timed, simulated = math.isfinite(study.rate_rps), not math.isnan(study.rows[0].simulated_rps.value)
    heads = ["bins", "batch s", "requests/s"] + ["simulated"] * simulated
    heads += ["gain", "of capacity"] + ["latency s (no queue)"] * timed + ["simulated s"] * (timed and simulated)
    rows = []
    for row in study.rows:
        cells = [str(row.bins), f"{row.batch_s:.4g}", f"{row.throughput_rps:.4g}"]
        cells += [_estimate(row.simulated_rps)] * simulated
        cells += [
            f"{100 * (row.throughput_rps / study.one_bin_rps - 1):.1f} %",
            f"{100 * row.throughput_rps / study.capacity_rps:.1f} %",
        ]
        waits = [f"{row.latency_s:.4g}"] * timed + [_estimate(row.simulated_latency_s)] * (timed and simulated)
        cells += [UNKNOWN] * len(waits) if study.overloads(row) else waits
        rows.append([*cells, cuts_text(row.cuts_s)])
    print_table([*heads, "boundaries s"], rows, drops=("boundaries s", "batch s"))


def _show_queue(study: QueueStudy) -> None:
    heads = ["load", *(f"{label}" for label in theory.ORDERS.values()), "gap", "retained", "slowdown FCFS", "SRPT"]
    rows = []
    for i, load in enumerate(study.loads):
        here = {name: sojourns[i] for name, sojourns in study.orders.items()}
        kept = theory.share_kept(here["fcfs"], here["sprpt"], here["srpt"])
        rows.append(
            [
                f"{load:g}",
                *(f"{here[name].mean_s:.4g}" for name in theory.ORDERS),
                f"{100 * (1 - here['srpt'].mean_s / here['fcfs'].mean_s):.1f} %",
                f"{100 * kept:.0f} %" if math.isfinite(kept) else UNKNOWN,
                f"{here['fcfs'].slowdown:.3g}",
                f"{here['srpt'].slowdown:.3g}",
            ]
        )
    print_table(heads, rows, drops=("slowdown FCFS", "SRPT"))
    note = "Mean seconds from arrival to end. Gap: what SRPT saves of FCFS; kept: the predicted SRPT's share of it."
    console().print(note, style="dim", highlight=False)


def _estimate(value: Estimate) -> str:
    half = f" ± {two_digits(value.half_width)}" if value.has_interval else ""
    return f"{value.value:.4g}{half}"


def _tokens(source: str) -> Floats:
    if Path(source).suffix == ".txt":
        tokens = _numbers(Path(source)).ravel()
        if not (np.isfinite(tokens).all() and (tokens > 0).all()):
            raise InputError(f"{source} must hold finite lengths above 0, one a line")
        return tokens
    from lengthwise.cli import workload_summary

    return np.asarray(workload_summary.opened(source, None, DRAWN, 0).output_tokens, float)


def _numbers(path: Path) -> Floats:
    """A table of numbers between spaces or commas, a row a line."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} must hold numbers, as many in each line: {error}") from None
    rows: list[list[float]] = []
    for number, line in enumerate(lines, 1):
        if words := line.replace(",", " ").split():
            rows.append(_row(path, number, words))
            if len(words) != len(rows[0]):
                raise InputError(
                    f"{path} must hold as many numbers in each line, {len(rows[0])} as in its first; line {number} "
                    f"has {len(words)}: {line.strip()!r}"
                )
    if not rows:
        raise InputError(f"{path} holds no numbers; write one request a line")
    return np.array(rows)


def _row(path: Path, number: int, words: Sequence[str]) -> list[float]:
    try:
        return [float(word) for word in words]
    except ValueError:
        raise InputError(f"{path} must hold numbers; line {number} is {' '.join(words)!r}") from None


def _seconds(tokens: Floats, token_time: float, fixed_time: float) -> Floats:
    if not (math.isfinite(token_time) and token_time > 0 and math.isfinite(fixed_time) and fixed_time >= 0):
        raise InputError(
            f"--token-time must be above 0 and --fixed-time at least 0 seconds; they are {token_time:g} and "
            f"{fixed_time:g}"
        )
    return fixed_time + token_time * tokens


def _named(*values: Any) -> list[tuple[str, Any]]:
    return list(zip(("--uniform", "--exponential", "--lengths"), values, strict=True))
