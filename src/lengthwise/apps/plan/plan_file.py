"""A plan as JSON, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lengthwise.schema.app import AppMethod, AppPlan, AppSpan, AppStage, AppWhatIf, ModelPlan, Switch
from lengthwise.schema.errors import InputError
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.files import write_whole

FORMAT = "lengthwise application plan 1"


def write_plan(path: Path | str, plan: AppPlan) -> None:
    """Writes a plan; NaN is written as null."""
    told = {"format": FORMAT, **_plain(asdict(plan))}
    write_whole(path, (json.dumps(told, allow_nan=False) + "\n").encode())


def read_plan(path: Path | str) -> AppPlan:
    """The plan of a file.

    Raises:
        InputError: It cannot be read, or is no plan.
    """
    try:
        told = json.loads(Path(path).read_text(encoding="utf-8"))
        if told.get("format") != FORMAT:
            raise InputError(
                f"{path} must be an application's plan as `lengthwise app plan --json` writes it"
            )
        return _plan(told)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"cannot read the plan {path}: {type(error).__name__}: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _plan(told: Mapping[str, Any]) -> AppPlan:
    return AppPlan(
        models=tuple(told["models"]),
        method=told["method"],
        stages=tuple(map(_stage, told["stages"])),
        planned=tuple(_plans(plans) for plans in told["planned"]),
        spare=_plans(told["spare"]),
        makespan=_estimate(told["makespan"]),
        makespans_s=tuple(told["makespans_s"]),
        quantiles_s={float(level): value for level, value in told["quantiles_s"].items()},
        spans=tuple(AppSpan(**{**s, "plan": s["plan"] and ModelPlan(**s["plan"])}) for s in told["spans"]),
        idle_s=told["idle_s"],
        flops=tuple(told["flops"]),
        tokens=tuple(told["tokens"]),
        methods=tuple(map(_method, told["methods"])),
        what_ifs=tuple(
            AppWhatIf(w["name"], _estimate(w["makespan"]), _estimate(w["difference"]))
            for w in told["what_ifs"]
        ),
        search_s=told["search_s"],
        notes=tuple(told["notes"]),
    )


def _method(told: Mapping[str, Any]) -> AppMethod:
    ends = tuple(told.get("makespans_s", ()))
    return AppMethod(**{**told, "makespan": _estimate(told["makespan"]), "makespans_s": ends})


def _stage(told: Mapping[str, Any]) -> AppStage:
    placement = {int(m): tuple(map(tuple, replicas)) for m, replicas in told["placement"].items()}
    switches = tuple(Switch(**{**s, "replica": tuple(s["replica"])}) for s in told["switches"])
    return AppStage(**{**told, "plans": _plans(told["plans"]), "placement": placement, "switches": switches})


def _plans(told: list[dict[str, Any]]) -> tuple[ModelPlan, ...]:
    return tuple(ModelPlan(**one) for one in told)


def _estimate(told: Mapping[str, Any]) -> Estimate:
    return Estimate(**{name: math.nan if value is None else value for name, value in told.items()})
