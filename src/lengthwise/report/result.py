"""One variant's result and the limits that its scenario sets."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lengthwise.metrics import Extrapolation, Summary
from lengthwise.report.formatting import TIMES, seconds
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import Records


@dataclass(frozen=True)
class Result:
    """One variant: its numbers, the records its curves are drawn from, and what ran."""

    name: str  # unique in a report
    summary: Summary  # numbers over all seeds
    records: Records  # one run, which curves and timelines show
    deployment: Deployment | None  # what ran; None where a real engine was measured
    scenario_text: str = ""  # the scenario as TOML, shown verbatim; may be empty
    summaries: Sequence[Summary] = ()  # one per seed; variants with the same seeds are compared in pairs
    notes: Sequence[str] = ()  # sentences that limit the trust in the numbers, for example extrapolated costs
    out_of_range: Sequence[Extrapolation] = ()  # where runs left the range of the measurements behind the cost tables
    model_draws: int = 0  # runs under perturbed cost tables, behind the model intervals
    engine: Mapping[str, str] = field(default_factory=dict)  # what is known of a measured engine, by label


def check_results(results: list[Result]) -> None:
    """Raise InputError where there is no result or two variants share a name."""
    if not results:
        raise InputError("a report needs at least one result; the list is empty")
    names = [r.name for r in results]
    if len(set(names)) < len(names):
        repeated = sorted({n for n in names if names.count(n) > 1})
        raise InputError(f"variants in a report must have unique names; used twice: {', '.join(repeated)}")


def scenario_of(result: Result) -> dict[str, Any]:
    """Return the scenario as nested tables; empty where there is none or it cannot be parsed."""
    try:
        return tomllib.loads(result.scenario_text)
    except tomllib.TOMLDecodeError:
        return {}


def title(results: Sequence[Result]) -> str:
    """Return the common description, else the name of a single scenario, else the hardware."""
    descriptions = {str(scenario_of(r).get("description", "")) for r in results}
    if len(descriptions) == 1 and (description := descriptions.pop()):
        return description
    name = str(scenario_of(results[0]).get("name", "")) if len(results) == 1 else ""
    return name or hardware(results)


def hardware(results: Sequence[Result]) -> str:
    """Return model and GPUs if shared, else the number of deployments; with measured variants, their engines."""
    known = [r.deployment for r in results if r.deployment is not None]
    if len(known) < len(results):
        measured = [r for r in results if r.deployment is None]
        labels = (
            " on ".join(filter(None, (r.engine.get("Model"), r.engine.get("Engine")))) or r.name for r in measured
        )
        return " / ".join(dict.fromkeys(labels))
    setups = {(d.model.name, d.parallel.gpus, d.gpu.name) for d in known}
    if len(setups) == 1:
        model, gpus, gpu = setups.pop()
        return f"{model} on {gpus} {TIMES} {gpu}"
    models = {model for model, _, _ in setups}
    count = f"{len(results)} deployments"
    return f"{models.pop()}: {count}" if len(models) == 1 else count


def workload(result: Result) -> str:
    """Return the source and the load of requests ("chat-1m, 4.5 requests/s"); "" if unknown."""
    table = scenario_of(result).get("workload", {})
    source = table.get("preset") or table.get("trace")
    if not source and "prompt" in table:
        source = f"prompts {_lengths(table['prompt'])}, outputs {_lengths(table.get('output'))}"
    rate, arrivals = table.get("request_rate"), table.get("arrivals")
    if "concurrency" in table:
        load = f"{table['concurrency']:,} concurrent requests"
    elif isinstance(rate, int | float):
        load = "all at once" if rate == float("inf") else f"{rate:g} requests/s"
    else:
        kind = arrivals.get("kind") if isinstance(arrivals, dict) else arrivals
        load = str(kind or "").replace("_", " ")
    return ", ".join(filter(None, (str(source or ""), load)))


def _lengths(table: Any) -> str:
    if not isinstance(table, dict):
        return str(table)
    numbers = [f"{key} {value:g}" for key, value in table.items() if isinstance(value, int | float)]
    return " ".join([str(table.get("kind", "")), *numbers]).strip()


def slo_text(result: Result) -> str:
    """Return the SLOs ("TTFT ≤ 2 s, TPOT ≤ 120 ms"); "" where there are none."""
    goodput = result.summary.goodput
    limits = {} if goodput is None else goodput.slo.limits
    return ", ".join(
        f"{name.removesuffix('_s').upper()} \N{LESS-THAN OR EQUAL TO} {seconds(v)}" for name, v in limits.items()
    )
