"""Answers of the planner's page: numbers, curves over the rate, and the command and scenario that give the same."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lengthwise import catalog, policy, workload
from lengthwise.config.scenario import Scenario
from lengthwise.report.binding import bottleneck_of
from lengthwise.report.json_file import plain
from lengthwise.report.summary_table import rows
from lengthwise.schema.estimate import Estimate
from lengthwise.ui.page import (
    Page,
    Values,
    fields_of,
    require_model,
    require_name,
    require_number,
    require_time,
    require_workload,
)
from lengthwise.ui.work import Task
from lengthwise.usecases import simulate
from lengthwise.usecases.short_options import scenario_of
from lengthwise.usecases.simulate import VariantOutcome

SHORT = ("model", "gpu", "workload", "rate", "tp")
SETTINGS = {
    "replicas": "deployment.replicas",
    "max_num_seqs": "engine.max_num_seqs",
    "max_num_batched_tokens": "engine.max_num_batched_tokens",
    "policy": "scheduler.policy",
    "ttft": "slo.ttft",
    "tpot": "slo.tpot",
}
"""By field of the page: the key of the scenario."""
DEFAULTS: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "gpu": "H100",
    "workload": "chat-1m",
    "rate": 20.0,
    "tp": None,
    "replicas": 1,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
    "policy": "vllm_v1",
    "ttft": "500ms",
    "tpot": "50ms",
}
CURVE = (0.25, 0.5, 0.71, 1.0, 1.41, 2.0, 2.83, 4.0)  # rates of the curves, in multiples of the chosen one
CARDS = (
    "ttft_s.p50",
    "ttft_s.p90",
    "tpot_s.p50",
    "jct_s.p50",
    "rates.slo",
    "rates.output",
    "cost.output",
    "hardware.busy",
)
CHARTS: dict[str, tuple[str, str, Callable[[Any], Estimate]]] = {
    "ttft": ("TTFT, p90", "s", lambda s: s.ttft_s.p90),
    "tpot": ("TPOT, p50", "s", lambda s: s.tpot_s.p50),
    "jct": ("JCT, p50", "s", lambda s: s.jct_s.p50),
    "goodput": ("Goodput", "requests/s", lambda s: s.goodput.requests_per_s),
}


def choices() -> dict[str, Any]:
    """Return the names that the page's lists offer, and the defaults of its fields."""
    schedulers = sorted({name.partition("(")[0] for axis, name, _ in policy.catalog() if axis == "scheduler"})
    return {
        "models": sorted(catalog.models()),
        "gpus": sorted(catalog.gpus()),
        "workloads": list(workload.presets()),
        "policies": schedulers,
        "defaults": DEFAULTS,
    }


def answer(values: Mapping[str, Any], *, complete: bool, check: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Simulate the page's settings, at the chosen rate and at the rates of the curves.

    Args:
        values: The fields of the page (DEFAULTS); others are refused.
        complete: With the seeds and the cost model's error of ``lengthwise simulate``, so that the numbers have
            intervals; otherwise one seed, which takes a tenth of the time.
        check: Called between simulations; it may raise.

    Raises InputError for unknown fields and names and for wrong values. Names of files are not accepted.
    """
    fields = _checked(values)
    quick = [] if complete else ["run.seeds=1", "run.model_draws=0"]
    settings = [f"{key}={fields[name]}" for name, key in SETTINGS.items()]

    def scenario(rate: float, extra: list[str]) -> Scenario:
        short = {name: fields[name] for name in SHORT} | {"rate": rate}
        return scenario_of(None, [*settings, *extra], **short)

    chosen = scenario(fields["rate"], quick)
    outcome = simulate.run(chosen, jobs=1)[0]
    result = simulate.result_of(outcome)
    table = {row.metric.key: row for row in rows([result])}
    deployed = outcome.variant.deployment
    points = []
    for factor in CURVE:
        check()
        rate = fields["rate"] * factor
        curve = outcome if factor == 1 else simulate.run(scenario(rate, [*quick, "run.model_draws=0"]), jobs=1)[0]
        points.append((rate, curve))
    return {
        "complete": complete,
        "deployment": f"{deployed.gpus} x {deployed.gpu.name}, tp {deployed.parallel.tp}, "
        f"{deployed.price_per_hour_usd:.2f} $/h",
        "cards": [_card(table[key]) for key in CARDS if key in table],
        "charts": {key: _chart(key, points) for key in CHARTS},
        "shares": _shares(outcome),
        "bottleneck": plain(bottleneck_of(result)),
        "notes": list(outcome.notes),
        "command": _command(fields),
        "scenario": scenario(fields["rate"], []).to_toml(),
    }


def _checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with their defaults. Raises InputError for fields and values that the page does not have."""
    fields = fields_of(dict(values), DEFAULTS)
    require_model(fields["model"])
    require_name("GPU", fields["gpu"], catalog.gpus())
    require_name("scheduler", fields["policy"], choices()["policies"])
    require_workload(fields["workload"])
    for name in ("rate", "tp", "replicas", "max_num_seqs", "max_num_batched_tokens"):
        if name != "tp" or fields[name] is not None:
            require_number(name, fields[name])
    for name in ("ttft", "tpot"):
        require_time(name, fields[name])
    return fields


def _card(row: Any) -> dict[str, str]:
    cell = row.cells[0]
    return {
        "label": row.metric.label,
        "unit": row.unit,
        "value": cell.text,
        "interval": cell.interval,
        "model": cell.model,
    }


def _chart(key: str, points: list[tuple[float, VariantOutcome]]) -> dict[str, Any]:
    label, unit, read = CHARTS[key]
    estimates: list[Estimate] = [read(outcome.summary) for _, outcome in points]
    return {
        "label": label,
        "unit": unit,
        "rates": [rate for rate, _ in points],
        "values": [_number(one.value) for one in estimates],
        "half_widths": [_number(one.half_width) for one in estimates],
    }


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _shares(outcome: VariantOutcome) -> list[dict[str, Any]]:
    """Return the mean seconds of a finished request in the queue, in prefill, and in decode, for the first seed."""
    r = outcome.records.requests
    done = np.isfinite(r.finished_s)
    if not done.any():
        return []
    parts = [("queue", r.arrival_s, r.scheduled_s), ("prefill", r.scheduled_s, r.first_token_s)]
    parts.append(("decode", r.first_token_s, r.finished_s))
    return [{"part": name, "mean_s": float((end[done] - start[done]).mean())} for name, start, end in parts]


def _command(fields: Mapping[str, Any]) -> str:
    """Return the command that gives the complete answer."""
    words = ["lengthwise", "simulate"]
    for name in SHORT:
        if fields[name] is not None and not (name == "workload" and fields[name] == DEFAULTS["workload"]):
            value = fields[name]
            words += [f"--{name}", f"{value:.15g}" if isinstance(value, float) else str(value)]
    for name, key in SETTINGS.items():
        if key.startswith("slo.") or fields[name] != DEFAULTS[name]:  # the other defaults are those of a scenario
            words += ["--set", f"{key}={fields[name]}"]
    return shlex.join(words)


def _answer(values: Values, task: Task) -> dict[str, Any]:
    return answer(values, complete=values.pop("complete", False) is True, check=task.check)


PAGE = Page("plan", "Plan", choices, {"answer": _answer})
