"""From a choice of schedule, made now or read from its file, to the phases that a gateway keeps."""

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
from lengthwise.schema.schedule import ScheduleRow
from lengthwise.usecases.schedule import plan_facts, plan_schedule, task_of

_HIGH = 2.326
"""Standard deviations above the mean that all but one in a hundred stay below."""
_ROUNDING = 1e-9
_MEND = "give the scenario that it was made for, or plan this one anew (lengthwise schedule SCENARIO --json PLAN.json)"
_UNKNOWN = {"throughput_rps", "latency_s", "latency_high_s", "cycle_s", "encode_s", "decode_s", "memory_share"}


@dataclass(frozen=True)
class PlannedRun:
    """A schedule that is to be run.

    Attributes:
        row: It, and what it should yield on one engine.
        phases: What a gateway is told of it; None: encoding and decoding are split between engines (WAA), which takes
            no phases, only as many requests under way as planned.
        bound_s: Latency that must be held; infinite: none.
        bound_tokens: Output tokens that the bound is for.
        share: Of the requests that must be served within the bound (``share_of``).
        source: Where the schedule is from.
        level: The quantile that it was planned for, of outputs and of batches.
    """

    row: ScheduleRow
    phases: Phases | None
    bound_s: float
    bound_tokens: int
    share: float
    source: str
    level: float = 0.99


def planned_run(scenario: Scenario, file: Path | None = None, *, threshold: float | None = None) -> PlannedRun:
    """The schedule of a scenario as it can be kept before engines.

    Args:
        scenario: Whose lengths are served; its [schedule] is planned where no file is given.
        file: What ``lengthwise schedule --json`` wrote, or ``--deploy``; only with it WAA, whose engines it is for.
        threshold: Resizes encodings so that work stays within this share of its mean; None: as was planned.

    Raises:
        InputError: No schedule meets the bound, engines cannot be held to it, or it does not fit the scenario's
            lengths.
    """
    if file is None:
        plan = plan_schedule(scenario)
        row, bound_s, tokens, source = plan.chosen, plan.bound_s, plan.quantile_tokens, scenario.source
        planned, level = plan.threshold, plan.level
    else:
        told = _report(file)
        _require_same(told, scenario, file)
        row, bound_s, tokens, planned, level = _read(told, file)
        source = str(file)
    task = task_of(scenario)
    _require_reached(row, task, scenario, file)
    if file is not None and is_split(row):
        _require_not_resized(row, threshold)
        phases = None
    else:
        phases = phases_of(row, task, planned if threshold is None else threshold)
    return PlannedRun(row, phases, bound_s, tokens, share_of(task, tokens, level), source, level)


def share_of(task: TaskLengths, tokens: int, level: float) -> float:
    """The share of requests that a bound for an output of so many tokens must hold for, always below 1.

    Where that output is the quantile, it is the quantile's level. Of a fixed length it is all shorter outputs, and of
    those as long the level, as a bound is for batches as heavy as that share of them are.
    """
    shorter = float(task.output_pmf[:tokens].sum())
    as_long = float(task.output_pmf[tokens : tokens + 1].sum())
    share = shorter + level * as_long
    is_quantile = shorter < level <= shorter + as_long + _ROUNDING
    return level if is_quantile or share > 1 - _ROUNDING else share


def phases_of(row: ScheduleRow, task: TaskLengths, threshold: float | None = None) -> Phases:
    """What a gateway must be told to keep a schedule over requests of such lengths.

    An engine never has more than the decode batch that all but one phase in a hundred stay below, and an encoding,
    of whose seats the last ones are about to be left.

    Raises:
        InputError: It is not one of phases, or its phases are longer than the longest output.
    """
    require_phases(row)
    require_steps(task, row.decode_steps)
    shares = phase_loads(task, row.decode_steps)
    mean = row.encode_batch * float(shares.seqs[0])
    spread = math.sqrt(row.encode_batch * float(shares.seqs_variance[0]))
    high = math.ceil(max(mean + _HIGH * spread, mean * (1 + (threshold or 0.0)))) + row.encode_batch
    return Phases(
        row.encode_batch,
        row.decode_steps,
        decode_batch=max(1.0, mean),
        mean_prompt_tokens=max(1.0, task.mean_prompt_tokens),
        threshold=threshold,
        max_in_flight=high,
    )


def is_split(row: ScheduleRow) -> bool:
    """Whether some GPUs only encode and others only decode."""
    return row.strategy.startswith("waa")


def _require_not_resized(row: ScheduleRow, threshold: float | None) -> None:
    """Nothing, unless encodings are to be resized that no admission forms.

    Raises:
        InputError: They are.
    """
    if threshold is not None:
        raise InputError(
            f"threshold must be left out: the schedule is {row.words}, and the engine that encodes forms its batches "
            "itself"
        )


def require_phases(row: ScheduleRow) -> None:
    """Nothing, if admission alone can keep the schedule.

    Raises:
        InputError: It cannot; the message says what does it.
    """
    if is_split(row):
        raise InputError(
            f"the schedule is {row.words}: some GPUs only encode, others only decode, which takes engines that "
            "split prefill and decode. `lengthwise schedule SCENARIO --deploy DIR` writes their commands, and with "
            "`--schedule DIR/PLAN.json` requests are played before their router; with --strategy rra phases are "
            "chosen, which engines keep as they are"
        )
    if row.strategy != Strategy.RRA:
        raise InputError(f"a schedule of phases (rra), or a split one (waa) can be run; this one is {row.words}")


def _require_same(report: dict[str, Any], scenario: Scenario, path: Path) -> None:
    """Nothing, if the plan is of the scenario's model and GPUs, as far as it says.

    Raises:
        InputError: It is of others.
    """
    metadata = report.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    for what, here in plan_facts(scenario).items():
        there = metadata.get(what)
        if isinstance(there, str) and there.rsplit("/", 1)[-1].lower() != here.rsplit("/", 1)[-1].lower():
            raise InputError(
                f"the plan {path} must be of the scenario's {what}, {here} ({scenario.source}); it is of {there}: "
                f"{_MEND}"
            )


def _require_reached(row: ScheduleRow, task: TaskLengths, scenario: Scenario, file: Path | None) -> None:
    """Nothing, if the schedule's phases are no longer than the scenario's longest output.

    Raises:
        InputError: They are: the plan was made for longer ones.
    """
    if file is not None and row.strategy == Strategy.RRA and row.decode_steps > task.max_output_tokens:
        raise InputError(
            f"the plan {file} has N_D = {row.decode_steps} decode iterations, which must be within the longest output "
            f"({task.max_output_tokens} tokens) of [workload] in {scenario.source}: it was made for longer outputs; "
            f"{_MEND}"
        )


def _report(path: Path) -> dict[str, Any]:
    try:
        told = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InputError(f"the schedule {path} must be a file that can be read: {error.strerror}") from error
    except ValueError:
        told = None
    if not isinstance(told, dict) or told.get("format") != "lengthwise.schedule":
        raise InputError(f"{path} must be what `lengthwise schedule --json` writes; it is not")
    return told


def _read(report: dict[str, Any], path: Path) -> tuple[ScheduleRow, float, int, float | None, float]:
    try:
        row = _row(report["chosen"])
        bound_s = math.inf if report["bound_s"] is None else float(report["bound_s"])
        threshold, level = report.get("threshold"), _level(report)
        return (row, bound_s, int(report["quantile_tokens"]), None if threshold is None else float(threshold), level)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path} must hold a whole schedule; what is wrong there is {type(error).__name__}: {error}"
        ) from error


def _level(report: dict[str, Any]) -> float:
    level = float(report.get("level", PlannedRun.level))
    if not 0 < level < 1:
        raise ValueError(f"level is {level}")
    return level


def _row(report: dict[str, Any]) -> ScheduleRow:
    """The row; what was not known or infinite is null in a file."""
    values: dict[str, Any] = {}
    for field in fields(ScheduleRow):
        if field.name not in report:
            continue
        value = report[field.name]
        values[field.name] = math.inf if value is None and field.name in _UNKNOWN else value
    for name in ("encode_batch", "decode_steps"):
        if not isinstance(values[name], int) or values[name] < 1:
            raise ValueError(f"{name} is {values[name]!r}")
    return ScheduleRow(**values)
