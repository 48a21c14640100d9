"""What was asked: the scenario behind a result, in a few words."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any

from lengthwise.report._numbers import seconds
from lengthwise.report.result import Result

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
    return ", ".join(
        f"{SLOS[name.removesuffix('_s')]} \N{LESS-THAN OR EQUAL TO} {seconds(v)}" for name, v in limits
    )


def _load(told: dict[str, Any]) -> str:
    if "concurrency" in told:
        return f"{told['concurrency']:,} requests at a time"
    rate = told.get("request_rate")
    if isinstance(rate, int | float):
        return "all at once" if rate == float("inf") else f"{rate:g} requests a second"
    kind = told.get("arrivals")
    kind = kind.get("kind") if isinstance(kind, dict) else kind
    return str(kind).replace("_", " ") if kind else ""


def _lengths(told: Any) -> str:
    """A distribution of lengths: its kind and its first numbers."""
    if not isinstance(told, dict):
        return str(told)
    numbers = [f"{key} {value:g}" for key, value in told.items() if isinstance(value, int | float)]
    return " ".join([str(told.get("kind", "")), *numbers]).strip()
