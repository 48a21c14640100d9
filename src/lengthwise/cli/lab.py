"""``lengthwise lab``."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from lengthwise.cli import options, outputs, progress
from lengthwise.cli.options import (
    Columns,
    CostSource,
    Gpu,
    HtmlReport,
    Jobs,
    JsonFile,
    Model,
    OptionalScenario,
    Quiet,
    Tp,
    WorkloadName,
)

EXAMPLES = """\b
Examples:
  lengthwise lab --model llama-3.1-8b --gpu H100 --rate 25
  lengthwise lab --model qwen2.5-32b --gpu H100 --workload trace.csv --rate 3 --tp 2
  lengthwise lab examples/lab-chat.toml
  lengthwise lab examples/lab-chat.toml --set lab.loads=[0.5,0.8] --report lab.html
"""


WITHOUT_A_FILE = """{
    policies = ["sjf", "isrtf", { name = "sjf, bounded wait", policy = "sjf", max_wait_factor = 1.0 }],
    predictors = ["oracle", { kind = "lognormal_error", sigma = 0.5, name = "sigma 0.5" },
        { kind = "lognormal_error", sigma = 1.0, name = "sigma 1" }]
}"""
"""[lab] of the short options: the errors show which predictor the gain needs."""


def run(
    scenario_file: OptionalScenario = None,
    *,
    model: Model = None,
    gpu: Gpu = None,
    tp: Tp = None,
    rate: Annotated[
        float | None,
        Option(metavar="RPS", help="Requests per second; default: 70, 90 and 110 % of what FCFS sustains."),
    ] = None,
    workload: WorkloadName = None,
    column: Columns = None,
    set_: Annotated[list[str] | None, options.setting("lab.seeds=10")] = None,
    cost: CostSource = None,
    seeds: Annotated[int | None, Option(min=1, help="Independent repetitions of each cell; default: 5.")] = None,
    jobs: Jobs = None,
    report: HtmlReport = None,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Compare scheduling policies and length predictors on the same requests.

    Every policy of [lab] serves the same requests with every predictor, at every load and batch size. Without a file,
    SJF, with and without a bound on waiting, and ISRTF run with true lengths and with predictions whose logarithms have
    errors of 0.5 and 1.
    """
    from lengthwise.usecases import short_options

    settings = [] if scenario_file is not None else ["lab=" + " ".join(WITHOUT_A_FILE.split())]
    settings += [] if rate is None else [f"lab.rates=[{rate:.15g}]"]
    settings += [] if seeds is None else [f"lab.seeds={seeds}"]
    scenario = short_options.scenario_of(
        scenario_file,
        [*short_options.columns(column), *settings, *options.overrides(set_, cost)],
        model=model,
        gpu=gpu,
        tp=tp,
        workload=workload,
    )
    outputs.require_outputs(json, report, scenario.files)
    options.print_notes(scenario.notes, quiet=quiet)
    from lengthwise import report as reports
    from lengthwise.cli.tables import console
    from lengthwise.usecases import lab

    with progress.simulating(quiet=quiet) as advance:
        table = lab.lab(scenario, jobs=jobs, progress=advance)
    if not quiet and json != outputs.STDOUT:
        out = console()
        if scenario.description:
            out.print(scenario.description, style="dim")
        out.print(reports.lab_table(table))
    outputs.write_outputs(json, report, table, reports.write_lab_json, reports.write_lab_html, quiet=quiet)
