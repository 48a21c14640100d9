"""The result of one variant, and the limits that its scenario sets."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lengthwise.metrics import Extrapolation, Summary
from lengthwise.report.formatting import TIMES, counted, seconds
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import Records


@dataclass(frozen=True)
class Result:
    """One variant: the numbers, the records behind the curves, and the deployment."""

    name: str  # unique in a report
    summary: Summary  # numbers over all seeds
    records: Records  # one run, which curves and timelines show
    deployment: Deployment | None  # what ran; None where a real engine was measured
    scenario_text: str = ""  # the scenario as TOML, shown verbatim; may be empty
    summaries: Sequence[Summary] = ()  # one per seed; variants with the same seeds are compared seed by seed
    notes: Sequence[str] = ()  # sentences that limit the trust in the numbers, for example extrapolated costs
    extrapolations: Sequence[Extrapolation] = ()  # where runs left the range of the measurements behind the cost tables
    model_draws: int = 0  # runs under perturbed cost tables, behind the model intervals
    engine: Mapping[str, str] = field(default_factory=dict)  # what is known of a measured engine, by label


def check_results(results: list[Result]) -> None:
    """Raise InputError if there is no result, or two variants share a name."""
    if not results:
        raise InputError("a report needs at least one result; the list is empty")
    names = [r.name for r in results]
    if len(set(names)) < len(names):
        repeated = sorted({n for n in names if names.count(n) > 1})
        raise InputError(f"variants in a report must have unique names; used twice: {', '.join(repeated)}")


def shows_prefix_cache(results: Sequence[Result]) -> bool:
    """Return whether prompts share prefixes and a variant caches them, so that the report has numbers of the cache."""
    return any(
        r.deployment is not None and r.deployment.limits.enable_prefix_caching and r.summary.prefix_cache is not None
        for r in results
    )


def scenario_of(result: Result) -> dict[str, Any]:
    """Return the scenario as nested tables, or {} if there is no scenario or it cannot be parsed."""
    try:
        return tomllib.loads(result.scenario_text)
    except tomllib.TOMLDecodeError:
        return {}


def title(results: Sequence[Result]) -> str:
    """Return a report's title: the description that all variants share, a single scenario's name, or the hardware."""
    descriptions = {str(scenario_of(r).get("description", "")) for r in results}
    if len(descriptions) == 1 and (description := descriptions.pop()):
        return description
    name = str(scenario_of(results[0]).get("name", "")) if len(results) == 1 else ""
    return name or hardware(results)


def hardware(results: Sequence[Result]) -> str:
    """Return the model and the GPUs that ran, as text.

    If the variants differ, the text is the number of deployments. Measured variants have the names of their engines.
    """
    known = [r.deployment for r in results if r.deployment is not None]
    if len(known) < len(results):
        measured = [r for r in results if r.deployment is None]
        labels = (
            " on ".join(filter(None, (r.engine.get("Model"), r.engine.get("Engine")))) or r.name for r in measured
        )
        return " / ".join(dict.fromkeys(labels))
    setups = {(d.model.name, d.hardware) for d in known}
    if len(setups) == 1:
        model, gpus = setups.pop()
        return f"{model} on {gpus.replace(' x ', f' {TIMES} ')}"
    models = {model for model, _ in setups}
    count = f"{len(results)} deployments"
    return f"{models.pop()}: {count}" if len(models) == 1 else count


def workload(result: Result) -> str:
    """Return the source and the load of the requests ("chat-1m, 4.5 requests/s"), or "" if they are unknown."""
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


def sessions(result: Result) -> str:
    """Return the rate, turns, tool calls and system prompts of sessions ("2 sessions/s, 3 turns"), or ""."""
    table = scenario_of(result).get("workload", {})
    groups, turns = table.get("groups", {}), table.get("sessions", {}).get("turns", 1)
    count = groups.get("count", 0)
    parts = {
        "{:g} sessions/s": table.get("session_rate"),
        "{:g} turns": turns if turns != 1 else None,
        "{:g} tool calls a turn": table.get("tools", {}).get("calls"),
        f"{counted(count, 'system prompt')} of {{}} tokens": _lengths(groups["system_prompt"]) if groups else None,
    }
    return ", ".join(text.format(value) for text, value in parts.items() if value is not None)


def _lengths(table: Any) -> str:
    if not isinstance(table, dict):
        return str(table)
    if "tokens" in table:
        return f"{table['tokens']:,}"
    numbers = [f"{key} {value:g}" for key, value in table.items() if isinstance(value, int | float)]
    return " ".join([str(table.get("kind", "")), *numbers]).strip()


def slo_text(result: Result) -> str:
    """Return the SLOs ("TTFT ≤ 2 s, TPOT ≤ 120 ms"), or "" if there are none."""
    goodput = result.summary.goodput
    limits = {} if goodput is None else goodput.slo.limits
    return ", ".join(
        f"{name.removesuffix('_s').upper()} \N{LESS-THAN OR EQUAL TO} {seconds(v)}" for name, v in limits.items()
    )
