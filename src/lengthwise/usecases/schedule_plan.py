"""A chosen schedule, planned now or read from its file, and the settings of a gateway that runs it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lengthwise.config.scenario import Scenario
from lengthwise.gateway.config import Phases
from lengthwise.schedule import Strategy, TaskLengths
from lengthwise.schedule.lengths import phase_loads, require_steps
from lengthwise.schema.errors import InputError
from lengthwise.schema.schedule import LatencyBound, ScheduleRow
from lengthwise.usecases.schedule import plan_metadata, plan_schedule, task_of

_Z99 = 2.326  # 99 % quantile of the standard normal distribution
_ROUNDING = 1e-9
_REMEDY = (
    "give the scenario that it was made for, or plan this one again (lengthwise schedule SCENARIO --json PLAN.json)"
)
_INFINITE_IF_NULL = {
    "throughput_rps", "latency_s", "latency_high_s", "cycle_s", "prefill_s", "decode_s", "memory_share",
}  # fmt: skip


@dataclass(frozen=True)
class PlannedRun:
    """A schedule, and the settings with which a gateway in front of engines keeps to it."""

    row: ScheduleRow
    # The gateway's settings; None: prefill and decode are split between engines (WAA), and the gateway only limits
    # the requests in flight.
    phases: Phases | None
    bound: LatencyBound
    share: float  # of the requests that must be served within the bound (``share_of``)
    source: str


def planned_run(scenario: Scenario, file: Path | None = None, *, threshold: float | None = None) -> PlannedRun:
    """Return the schedule of a scenario, with the settings with which a gateway keeps to it.

    Args:
        scenario: Scenario with the lengths to serve. Without a file, the scenario's [schedule] is planned.
        file: Output of ``lengthwise schedule --json`` or ``--deploy``. Only a file can have a WAA schedule, which needs
            its own engines.
        threshold: Prefill batches are resized so that their work stays within this share of the mean work. By default
            the plan's threshold is used.
    """
    if file is None:
        plan = plan_schedule(scenario)
        row, bound, planned_threshold, source = plan.chosen, plan.bound, plan.threshold, scenario.source
    else:
        row, bound, planned_threshold = _read(file, scenario)
        source = str(file)
    task = task_of(scenario)
    if file is not None and row.strategy == Strategy.RRA and row.decode_steps > task.max_output_tokens:
        raise InputError(
            f"the plan {file} has N_D = {row.decode_steps} decode iterations, which must be within the longest output "
            f"({task.max_output_tokens} tokens) of [workload] in {scenario.source}: it was made for longer outputs; "
            f"{_REMEDY}"
        )
    phases = None
    if file is None or not is_split(row):
        phases = phases_of(row, task, planned_threshold if threshold is None else threshold)
    elif threshold is not None:
        raise InputError(
            f"threshold must be left out: the schedule is {row.words}, and the engine that prefills forms its batches "
            "itself"
        )
    return PlannedRun(row, phases, bound, share_of(task, bound.tokens, bound.level), source)


def share_of(task: TaskLengths, tokens: int, level: float) -> float:
    """Return the share of requests (below 1) that must meet a latency bound stated for outputs of ``tokens``.

    If this length is the quantile at ``level``, the share is the level. Otherwise it is the share of shorter outputs
    plus ``level`` times the share of equally long outputs, because a share ``level`` of these has light enough batches.
    """
    shorter = float(task.output_pmf[:tokens].sum())
    equal = float(task.output_pmf[tokens : tokens + 1].sum())
    share = shorter + level * equal
    is_quantile = shorter < level <= shorter + equal + _ROUNDING
    return level if is_quantile or share > 1 - _ROUNDING else share


def phases_of(row: ScheduleRow, task: TaskLengths, threshold: float | None = None) -> Phases:
    """Return the settings with which a gateway runs an RRA schedule in front of engines.

    The limit of requests at an engine is a decode batch that only one phase in a hundred exceeds, plus one prefill
    batch, which is admitted while the last requests of the previous phase are still finishing.

    Args:
        row: The schedule: prefill batch and decode steps of a phase.
        task: Lengths of the requests.
        threshold: Share by which the work of a phase may deviate from the mean (``policy.rra``); None: no adjustment.

    Raises:
        InputError: The schedule is WAA, or splits prefill and decode over GPUs, or its phase is longer than outputs.
    """
    if is_split(row):
        raise InputError(
            f"the schedule is {row.words}: some GPUs only prefill, others only decode, which needs engines that "
            "split prefill and decode. `lengthwise schedule SCENARIO --deploy DIR` writes their commands, and with "
            "`--schedule DIR/PLAN.json` requests are sent to their router. --strategy rra chooses phases, which "
            "engines run unchanged"
        )
    if row.strategy != Strategy.RRA:
        raise InputError(f"a schedule of phases (rra), or a split one (waa) can be run; this one is {row.words}")
    require_steps(task, row.decode_steps)
    shares = phase_loads(task, row.decode_steps)
    mean = row.prefill_batch * float(shares.seqs[0])
    sd = math.sqrt(row.prefill_batch * float(shares.seqs_variance[0]))
    high = math.ceil(max(mean + _Z99 * sd, mean * (1 + (threshold or 0.0)))) + row.prefill_batch
    return Phases(
        row.prefill_batch,
        row.decode_steps,
        decode_batch=max(1.0, mean),
        mean_prompt_tokens=max(1.0, task.mean_prompt_tokens),
        threshold=threshold,
        max_requests=high,
    )


def is_split(row: ScheduleRow) -> bool:
    """Return whether some GPUs only prefill and others only decode."""
    return row.strategy.startswith("waa")


def _read(path: Path, scenario: Scenario) -> tuple[ScheduleRow, LatencyBound, float | None]:
    """Read (schedule, bound, threshold) from a plan's file. Raises InputError if it is for another model or GPU."""
    report = None
    try:
        report = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InputError(f"the schedule {path} must be a file that can be read: {error.strerror}") from error
    except ValueError:
        pass
    if not isinstance(report, dict) or report.get("format") != "lengthwise.schedule":
        raise InputError(f"{path} must be what `lengthwise schedule --json` writes; it is not")
    metadata = report.get("metadata")
    for key, own in plan_metadata(scenario).items():
        planned = metadata.get(key) if isinstance(metadata, dict) else None
        if isinstance(planned, str) and planned.rsplit("/", 1)[-1].lower() != own.rsplit("/", 1)[-1].lower():
            raise InputError(
                f"the plan {path} must be of the scenario's {key}, {own} ({scenario.source}); it is of {planned}: "
                f"{_REMEDY}"
            )
    try:
        row, threshold = _row(report["chosen"]), report.get("threshold")
        bound_s = math.inf if report["bound_s"] is None else float(report["bound_s"])
        level = float(report.get("level", LatencyBound.level))
        if not 0 < level < 1:
            raise ValueError(f"level is {level}")  # noqa: TRY301
        bound = LatencyBound(bound_s, int(report["quantile_tokens"]), level, bool(report.get("worst_case", True)))
        return row, bound, None if threshold is None else float(threshold)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path} must hold a complete schedule; it does not: {type(error).__name__}: {error}"
        ) from error


def _row(report: dict[str, Any]) -> ScheduleRow:
    values: dict[str, Any] = {field.name: report[field.name] for field in fields(ScheduleRow) if field.name in report}
    values |= {name: math.inf for name in _INFINITE_IF_NULL & values.keys() if values[name] is None}
    for name in ("prefill_batch", "decode_steps"):
        if not isinstance(values[name], int) or values[name] < 1:
            raise ValueError(f"{name} is {values[name]!r}")
    return ScheduleRow(**values)
