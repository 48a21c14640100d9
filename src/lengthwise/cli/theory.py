"""``lengthwise theory``: multibin and queue."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from lengthwise.cli import outputs
from lengthwise.cli.options import HtmlReport, JsonFile, NoTable
from lengthwise.schema.errors import InputError

if TYPE_CHECKING:
    from lengthwise.schema.estimate import Estimate
    from lengthwise.theory import MultiBinStudy, QueueStudy

EXAMPLES = """\b
Examples:
  lengthwise theory multibin --batch 8 --bins 1,2,4,8,16,32 --uniform 1 20 --target 0.95
  lengthwise theory multibin --lengths chat-1m --rate 2 --report bins.html
  lengthwise theory queue --lengths chat-1m --slots 8 --load 0.5..0.95 --error 0.5
"""

_Uniform = Annotated[
    tuple[float, float] | None, Option(metavar="LOW HIGH", help="Uniform service times between two, seconds.")
]
_Exponential = Annotated[float | None, Option(metavar="RATE", help="Exponential service times, mean 1 / RATE s.")]
_Lengths = Annotated[
    str | None,
    Option(
        metavar="FILE|NAME",
        help="Output tokens of a trace or log, of a .txt file of numbers, or of a preset; times are linear in them.",
    ),
]
_TokenTime = Annotated[float, Option(metavar="SECONDS", help="With --lengths: time per token.")]
_FixedTime = Annotated[float, Option(metavar="SECONDS", help="With --lengths: fixed time per request.")]


def multibin(
    *,
    batch: Annotated[int, Option(help="Requests in a batch.")] = 8,
    bins: Annotated[str, Option(metavar="K,K,...", help="Numbers of bins.")] = "1,2,4,8,16,32",
    uniform: _Uniform = None,
    exponential: _Exponential = None,
    lengths: _Lengths = None,
    token_time: _TokenTime = 0.02,
    fixed_time: _FixedTime = 0.0,
    boundaries: Annotated[str, Option(help="optimal (proven or learned), equal (masses) or learned.")] = "optimal",
    rate: Annotated[float | None, Option(help="Arrival rate, requests a second; needed for latencies.")] = None,
    target: Annotated[float | None, Option(metavar="SHARE", help="Find the bins for this share of capacity.")] = None,
    error: Annotated[float, Option(help="Probability of each neighbouring bin, 0 to 0.5.")] = 0.0,
    accuracy: Annotated[
        list[str] | None, Option(metavar="K=SHARE", help="Accuracy of a predictor at K bins: 4=0.63; repeatable.")
    ] = None,
    requests: Annotated[int, Option(min=0, help="Requests per simulation; 0: no simulation.")] = 20_000,
    seeds: Annotated[int, Option(min=1, help="Simulations.")] = 5,
    report: HtmlReport = None,
    json: JsonFile = None,
    quiet: NoTable = False,
) -> None:
    """Show throughput, latency and boundaries by number of bins (Multi-Bin Batching).

    Simulated throughput and latency are shown next to the formulas.
    """
    from lengthwise import theory
    from lengthwise.config.sources import service_times

    outputs.require_outputs(json, report)
    times, metadata = service_times(uniform, exponential, lengths, token_time, fixed_time)
    metadata += [f"batches of {batch}", f"{boundaries} boundaries"]
    metadata += [f"accuracy {', '.join(accuracy)}"] if accuracy else []
    metadata += [f"neighbouring bins with probability {error:g} each"] if error else []
    metadata += [] if rate is None else [f"{rate:g} requests a second"]
    try:
        counts = [int(part) for part in bins.split(",")]
    except ValueError:
        raise InputError(f"--bins takes whole numbers between commas, such as 1,2,4; it is {bins!r}") from None
    try:
        shares = {int(count): float(share) for count, share in (text.split("=") for text in accuracy or ())}
    except ValueError:
        raise InputError(f"--accuracy takes K=SHARE, such as 4=0.63; it is {' '.join(accuracy or ())!r}") from None
    study = theory.multibin_study(
        times,
        batch,
        counts,
        rule=boundaries,
        rate_rps=math.nan if rate is None else rate,
        target_share=math.nan if target is None else target,
        error=error,
        accuracy=shares,
        requests=requests,
        seeds=seeds,
        curves=report is not None,
        metadata=metadata,
    )
    _finish(study, report, json, quiet=quiet)


def queue(
    *,
    load: Annotated[str, Option(metavar="SHARES", help="Utilization of a slot: 0.5,0.9 or 0.5..0.95.")] = "0.5..0.95",
    slots: Annotated[int, Option(help="Requests served at a time.")] = 1,
    uniform: _Uniform = None,
    exponential: _Exponential = None,
    lengths: _Lengths = None,
    token_time: _TokenTime = 0.02,
    fixed_time: _FixedTime = 0.0,
    error: Annotated[float, Option(help="Prediction error: standard deviation of ln(predicted / true).")] = 0.5,
    pairs: Annotated[Path | None, Option(help="A file of true and predicted tokens, two numbers a line.")] = None,
    seed: Annotated[int, Option(min=0, help="Seed of the order of errors.")] = 0,
    report: HtmlReport = None,
    json: JsonFile = None,
    quiet: NoTable = False,
) -> None:
    """Show what known or predicted lengths are worth at a load (M/G/1: FCFS, SJF, SRPT)."""
    import numpy as np

    from lengthwise import theory
    from lengthwise.config.sources import predicted_times, service_times

    outputs.require_outputs(json, report)
    true_and_predicted = None
    if pairs is None:
        times, metadata = service_times(uniform, exponential, lengths, token_time, fixed_time)
        metadata.append(f"prediction error {error:g}")
    else:
        if any(other is not None for other in (uniform, exponential, lengths)):
            raise InputError("--pairs contains lengths; leave --uniform, --exponential and --lengths out")
        true_and_predicted = predicted_times(pairs, token_time, fixed_time)
        times = theory.SampledTimes(true_and_predicted[0])
        metadata = [f"{len(true_and_predicted[0]):,} predictions of {pairs}"]
    try:
        low, dots, high = load.partition("..")
        ends = (float(low), float(high)) if dots else None
        loads = [float(f"{x:.6g}") for x in np.linspace(*ends, 10)] if ends else [float(x) for x in load.split(",")]
    except ValueError:
        raise InputError(f"--load takes 0.5,0.9 or a range 0.5..0.95; it is {load!r}") from None
    study = theory.queue_study(
        times,
        loads,
        sigma=error,
        slots=slots,
        pairs=true_and_predicted,
        seed=seed,
        metadata=[*metadata, "1 slot" if slots == 1 else f"{slots} slots"],
    )
    _finish(study, report, json, quiet=quiet)


def _finish(study: MultiBinStudy | QueueStudy, report: Path | None, json: Path | None, *, quiet: bool) -> None:
    from lengthwise.cli.tables import console
    from lengthwise.report.theory import answers, write_theory_html, write_theory_json
    from lengthwise.theory import MultiBinStudy

    if not quiet and json != outputs.STDOUT:
        out = console()
        out.print(", ".join(study.metadata), style="dim", highlight=False)
        if isinstance(study, MultiBinStudy):
            _show_bins(study)
        else:
            _show_queue(study)
        for line in answers(study):
            out.print(line, highlight=False)
    outputs.write_outputs(json, report, study, write_theory_json, write_theory_html, quiet=quiet)


def _show_bins(study: MultiBinStudy) -> None:
    from lengthwise.cli.tables import print_table
    from lengthwise.report.formatting import UNKNOWN, two_digits
    from lengthwise.report.theory import cuts_text

    def text(estimate: Estimate) -> str:
        half_width = f" ± {two_digits(estimate.half_width)}" if estimate.has_interval else ""
        return f"{estimate.value:.4g}{half_width}"

    timed, simulated = math.isfinite(study.rate_rps), not math.isnan(study.rows[0].simulated_rps.value)
    rows = []
    for row in study.rows:
        saturated = study.overloads(row)
        cells = {"bins": f"{row.bins}", "batch s": f"{row.batch_s:.4g}", "requests/s": f"{row.throughput_rps:.4g}"}
        if simulated:
            cells["simulated"] = text(row.simulated_rps)
        cells["gain"] = f"{100 * (row.throughput_rps / study.one_bin_rps - 1):.1f} %"
        cells["of capacity"] = f"{100 * row.throughput_rps / study.capacity_rps:.1f} %"
        if timed:
            cells["latency s (no queue)"] = UNKNOWN if saturated else f"{row.latency_s:.4g}"
        if timed and simulated:
            cells["simulated s"] = UNKNOWN if saturated else text(row.simulated_latency_s)
        cells["boundaries s"] = cuts_text(row.cuts_s)
        rows.append(cells)
    print_table(list(rows[0]), [list(cells.values()) for cells in rows], drops=("boundaries s", "batch s"))


def _show_queue(study: QueueStudy) -> None:
    from lengthwise import theory
    from lengthwise.cli.tables import console, print_table
    from lengthwise.report.formatting import UNKNOWN

    rows = []
    for i, load in enumerate(study.loads):
        sojourns = {name: by_load[i] for name, by_load in study.orders.items()}
        fcfs, srpt = sojourns["fcfs"], sojourns["srpt"]
        share = theory.share_retained(fcfs, sojourns["sprpt"], srpt)
        means = (f"{sojourns[name].mean_s:.4g}" for name in theory.ORDERS)
        gap = f"{100 * (1 - srpt.mean_s / fcfs.mean_s):.1f} %"
        retained = f"{100 * share:.0f} %" if math.isfinite(share) else UNKNOWN
        rows.append([f"{load:g}", *means, gap, retained, f"{fcfs.slowdown:.3g}", f"{srpt.slowdown:.3g}"])
    heads = ["load", *theory.ORDERS.values(), "gap", "retained", "slowdown FCFS", "SRPT"]
    print_table(heads, rows, drops=heads[-2:])
    console().print(
        "Mean seconds from arrival to completion. Gap: what SRPT saves of FCFS; retained: the share of it that "
        "predicted SRPT saves.",
        style="dim",
        highlight=False,
    )
