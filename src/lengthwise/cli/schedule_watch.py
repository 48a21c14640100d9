"""``lengthwise schedule watch``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from lengthwise.cli import options, outputs
from lengthwise.cli.options import CostSource, JsonFile, Quiet, ScenarioFile, TraceFormat
from lengthwise.schema.errors import InputError

if TYPE_CHECKING:
    from lengthwise.schedule import ReplanOptions
    from lengthwise.usecases.schedule_adaptation import ObservedRequests

EXAMPLES = """\b
Examples:
  lengthwise schedule watch examples/schedule-opt-13b.toml --records run.parquet
  lengthwise schedule watch examples/schedule-opt-13b.toml --workload exegpt-t --horizon 10min
"""


def run(
    scenario_file: ScenarioFile,
    *,
    records: Annotated[Path | None, Option(metavar="FILE", help="Replay a run: records of bench or simulate.")] = None,
    workload: Annotated[str | None, Option(metavar="FILE|NAME", help="Replay a trace, or draws of a preset.")] = None,
    format_: TraceFormat = None,
    false_positive_rate: Annotated[
        float,
        Option("--false-positive-rate", metavar="SHARE", help="Probability of any alarm if lengths never change."),
    ] = 0.01,
    min_requests: Annotated[int, Option("--least-requests", min=1, help="Requests that an alarm waits for.")] = 100,
    every: Annotated[int, Option(min=1, help="Test every N-th request, if neighbours in the trace are alike.")] = 1,
    storage: Annotated[str, Option(metavar="PLACE", help="Where weights are loaded from: dram or ssd.")] = "dram",
    horizon: Annotated[str, Option(metavar="TIME", help="How long new lengths are expected to last.")] = "1h",
    margin: Annotated[
        float | None, Option(metavar="SHARE", help="Tighten the bound by this share; default: by the observed drift.")
    ] = None,
    seed: Annotated[int, Option(min=0, help="Seed of the draws.")] = 0,
    set_: Annotated[list[str] | None, options.setting("schedule.gpus=8")] = None,
    cost: CostSource = None,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Detect when output lengths drift and how the schedule must change.

    Replays requests in order and reports each drift: the schedule that is best from then on, what the change costs and
    gains, and by how much and for how many requests the bound would have been exceeded without it.
    """
    from lengthwise import config

    scenario = config.load(scenario_file, options.overrides(set_, cost))
    outputs.require_outputs(json, None, scenario.files)
    from lengthwise.cli.tables import console
    from lengthwise.report.schedule import write_watched_json
    from lengthwise.report.schedule_text import watch_sentences
    from lengthwise.schedule import Monitor
    from lengthwise.usecases import schedule_adaptation

    monitor = Monitor(false_positive_rate, min_requests, every, seed)
    adapter = schedule_adaptation.adapter_of(scenario, monitor, replan_options(storage, horizon, margin))
    observed = _observed_requests(records, workload, format_, seed)
    options.print_notes(scenario.notes, quiet=quiet)
    report = schedule_adaptation.replay(adapter, observed, scenario.name)
    if not quiet and json != outputs.STDOUT:
        out = console()
        for line in watch_sentences(report):
            out.print(line)
    outputs.write_outputs(json, None, report, write_watched_json, quiet=quiet)


def replan_options(storage: str, horizon: str, margin: float | None) -> ReplanOptions:
    """Return the options that decide when a new schedule is worth the change."""
    from lengthwise.config import seconds
    from lengthwise.schedule import ReplanOptions

    try:
        horizon_s = float(horizon)
    except ValueError:
        try:
            horizon_s = seconds(horizon)
        except ValueError as error:
            raise InputError(f"--horizon {error}; it is {horizon!r}") from None
    return ReplanOptions(storage, horizon_s, margin)


def _observed_requests(records: Path | None, workload: str | None, format_: str | None, seed: int) -> ObservedRequests:
    from lengthwise.cli.records import read_named
    from lengthwise.config.sources import open_workload
    from lengthwise.usecases.schedule_adaptation import ObservedRequests

    if workload is not None and records is None:
        return ObservedRequests.of_workload(open_workload(workload, format_, seed=seed))
    if records is None or workload is not None:
        raise InputError("give the requests to replay, either --records FILE or --workload FILE|NAME")
    (measured,) = read_named([records])
    return ObservedRequests.of_records(measured)
