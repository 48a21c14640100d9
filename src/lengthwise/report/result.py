"""What a report shows: one variant and all that is known of it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lengthwise.metrics import Beyond, Summary
from lengthwise.report.formatting import seconds
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import Records


@dataclass(frozen=True)
class Result:
    """One variant: its numbers, the records its curves are drawn from, and what ran.

    Attributes:
        name: Of the variant, unique in a report.
        summary: Its numbers, over as many seeds as were run.
        records: One run of it; curves and timelines show this one.
        deployment: What ran; None where a real engine was measured, whose hardware nobody described.
        scenario_text: The scenario it came from, shown as it is; may be empty.
        summaries: One a seed, where there are several; variants with the same seeds are then
            compared pair by pair, which tells smaller differences apart.
        notes: What limits the trust in the numbers, a sentence each: extrapolated costs, for one.
        out_of_range: Where runs went beyond the measurements behind the cost tables.
        model_draws: Runs under tables that are a little off, behind the model intervals.
        engine: What is known of a measured engine, by label.
    """

    name: str
    summary: Summary
    records: Records
    deployment: Deployment | None
    scenario_text: str = ""
    summaries: Sequence[Summary] = ()
    notes: Sequence[str] = ()
    out_of_range: Sequence[Beyond] = ()
    model_draws: int = 0
    engine: Mapping[str, str] = field(default_factory=dict)


def check_results(results: list[Result]) -> None:
    """Raises InputError when there is nothing to show or two variants share a name."""
    if not results:
        raise InputError("a report needs at least one result; the list is empty")
    names = [r.name for r in results]
    if len(set(names)) < len(names):
        twice = sorted({n for n in names if names.count(n) > 1})
        raise InputError(f"variants in a report must have names of their own; used twice: {', '.join(twice)}")


TIMES = "\N{MULTIPLICATION SIGN}"
SLOS = {"ttft": "TTFT", "tpot": "TPOT", "jct": "JCT"}


def asked(result: Result) -> dict[str, Any]:
    """The scenario as nested tables; empty where there is none that can be read."""
    try:
        return tomllib.loads(result.scenario_text)
    except tomllib.TOMLDecodeError:
        return {}


def title(results: Sequence[Result]) -> str:
    """The question in one line: the description, else a lone scenario's name, else the hardware."""
    descriptions = {str(asked(r).get("description", "")) for r in results}
    if len(descriptions) == 1 and (described := descriptions.pop()):
        return described
    named = str(asked(results[0]).get("name", "")) if len(results) == 1 else ""
    return named or hardware(results)


def hardware(results: Sequence[Result]) -> str:
    """Model and GPUs where all variants share them, else how many there are to compare."""
    known = [r.deployment for r in results if r.deployment is not None]
    if len(known) < len(results):
        return " / ".join(dict.fromkeys(_measured(r) for r in results if r.deployment is None))
    setups = {(d.model.name, d.parallel.gpus, d.gpu.name) for d in known}
    if len(setups) == 1:
        model, gpus, gpu = setups.pop()
        return f"{model} on {gpus} {TIMES} {gpu}"
    models = {model for model, _, _ in setups}
    some = f"{len(results)} deployments"
    return f"{models.pop()}: {some}" if len(models) == 1 else some


def _measured(result: Result) -> str:
    """A measured engine in a few words."""
    return " on ".join(filter(None, (result.engine.get("Model"), result.engine.get("Engine")))) or result.name


def workload(result: Result) -> str:
    """Where requests came from and how fast: "chat-1m, 4.5 requests a second"; "" if unknown."""
    told = asked(result).get("workload", {})
    source = told.get("preset") or told.get("trace")
    if not source and "prompt" in told:
        source = f"prompts {_lengths(told['prompt'])}, outputs {_lengths(told.get('output'))}"
    return ", ".join(part for part in (str(source or ""), _load(told)) if part)


def promises(result: Result) -> str:
    """The SLOs: "TTFT ≤ 2 s, TPOT ≤ 120 ms"; "" where there are none."""
    goodput = result.summary.goodput
    if goodput is None:
        return ""
    limits = goodput.slo.limits.items()
    return ", ".join(f"{SLOS[name.removesuffix('_s')]} \N{LESS-THAN OR EQUAL TO} {seconds(v)}" for name, v in limits)


def _load(report: dict[str, Any]) -> str:
    if "concurrency" in report:
        return f"{report['concurrency']:,} requests at a time"
    rate = report.get("request_rate")
    if isinstance(rate, int | float):
        return "all at once" if rate == float("inf") else f"{rate:g} requests a second"
    kind = report.get("arrivals")
    kind = kind.get("kind") if isinstance(kind, dict) else kind
    return str(kind).replace("_", " ") if kind else ""


def _lengths(report: Any) -> str:
    """A distribution of lengths: its kind and its first numbers."""
    if not isinstance(report, dict):
        return str(report)
    numbers = [f"{key} {value:g}" for key, value in report.items() if isinstance(value, int | float)]
    return " ".join([str(report.get("kind", "")), *numbers]).strip()
