"""``lengthwise capacity``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Option

from lengthwise.cli import options, outputs, progress
from lengthwise.cli.options import (
    Columns,
    CostSource,
    Gpu,
    Jobs,
    JsonFile,
    Limits,
    Model,
    OptionalScenario,
    Quiet,
    Tp,
    WorkloadName,
)

if TYPE_CHECKING:
    from lengthwise.usecases.capacity import VariantCapacity

EXAMPLES = """\b
Examples:
  lengthwise capacity --model qwen3-32b --gpu H100 --workload 1000/200 --limit ttft.p90=2s
  lengthwise capacity examples/chat-70b.toml
  lengthwise capacity examples/chat-70b.toml --limit ttft.p90=2s --limit tbt.p99=200ms
"""


def run(
    scenario_file: OptionalScenario = None,
    *,
    model: Model = None,
    gpu: Gpu = None,
    tp: Tp = None,
    workload: WorkloadName = None,
    column: Columns = None,
    limit: Limits = None,
    set_: Annotated[list[str] | None, options.setting("deployment.tp=8")] = None,
    variant: Annotated[str | None, Option(metavar="NAME", help="Only this variant of the scenario.")] = None,
    cost: CostSource = None,
    precision: Annotated[float | None, Option(help="Relative half-width to reach; default: 0.025.")] = None,
    seeds: Annotated[int | None, Option(min=1, help="Independent repetitions; default: 5.")] = None,
    jobs: Jobs = None,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Find the request rate that a deployment sustains within limits.

    The rate has a confidence interval. By default 99 % of the requests must be scheduled within 5 s.
    """
    given = {"precision": precision, "seeds": seeds}
    search = [(f"--{name}", f"search.{name}={value}") for name, value in given.items() if value is not None]
    from lengthwise.usecases import short_options

    scenario = short_options.scenario_of(
        scenario_file,
        [*short_options.columns(column), *options.overrides(set_, cost), *short_options.limits(limit), *search],
        model=model,
        gpu=gpu,
        tp=tp,
        workload=workload,
    )
    if variant is not None:
        scenario = scenario.only(variant)
    outputs.require_outputs(json, None, scenario.files)
    options.print_notes(scenario.notes, quiet=quiet)
    from lengthwise.usecases.capacity import capacities, capacities_json

    with progress.simulating(quiet=quiet) as advance:
        found = capacities(scenario, jobs=jobs, progress=advance)
    if not quiet and json != outputs.STDOUT:
        show(found)
    if json is not None:
        outputs.write_text(json, capacities_json(found))


def show(found: list[VariantCapacity]) -> None:
    """Print a row for each variant: its capacity, the binding limit, and the limited metrics at capacity."""
    from lengthwise import report
    from lengthwise.cli.tables import console, print_table
    from lengthwise.report.formatting import two_digits
    from lengthwise.report.search_text import metric_name, prefix_cache_metrics
    from lengthwise.schema.plan import limit_text

    limits, rows = found[0].limits, []
    cached = prefix_cache_metrics(sustained.at for sustained in found)
    for sustained in found:
        capacity = sustained.capacity
        if sustained.at is None:
            rate, half_width, model, metrics = "0", "", "", ["-"] * (1 + len(limits) + len(cached))
        else:
            rate = f"{capacity.rate_rps.value:.4g}"
            half_width = two_digits(capacity.rate_rps.half_width) if capacity.rate_rps.has_interval else "unknown"
            model = report.model_text(capacity.rate_rps)
            metrics = [report.metric_text(limit.metric, sustained.at.value(limit.metric)) for limit in sustained.limits]
            metrics.insert(0, f"{sustained.at.rate_rps:.4g}")
            metrics += [report.metric_text(name, sustained.at.value(name)) for name in cached]
        binds, top = metric_name(capacity.binds), f"{capacity.ceiling.rate_rps:.4g}"
        rows.append([sustained.name, rate, half_width, model, binds, top, *metrics])
    head = ["", "requests/s", "±", "(model)", "bound by", "at most", "simulated/s"]
    limited = [*(metric_name(limit.metric) for limit in limits), *(metric_name(name) for name in cached)]
    print_table([*head, *limited], rows, drops=["at most", *reversed(limited), "simulated/s"])
    out = console()
    out.print(f"Limits: {', '.join(limit_text(limit) for limit in limits)}.", highlight=False)
    for note in dict.fromkeys(note for sustained in found for note in sustained.notes):
        out.print(note, highlight=False)
    runs = sum(sustained.capacity.effort.simulations for sustained in found)
    requests = sum(sustained.capacity.effort.requests for sustained in found)
    out.print(
        "± half-width of a 95 % interval: spread of the seeds, and drift with longer runs. (...): 90 % interval of the "
        "cost model's error, which variants on one GPU share. Bound by: what breaks first above the rate, perhaps by a "
        "jump. At most: upper bound of any schedule. Metrics: at simulated/s, the lower end of ±. "
        f"{runs:,} runs of {requests:,} requests.",
        style="dim",
        highlight=False,
    )
