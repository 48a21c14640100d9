"""The requests of a load test, facts about the server's deployment, and advice on failures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lengthwise.config.scenario import Scenario, load, loads
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import shape_facts
from lengthwise.schema.workload import Workload
from lengthwise.usecases.requests import workload_by_seed
from lengthwise.usecases.variants import hardware

_UNKNOWN_DEPLOYMENT = '[deployment]\nmodel = "a server that runs already"\ngpu = "unknown"\n'


def requests(scenario: Scenario, seed: int | None = None) -> Workload:
    """Return the requests of a simulation of the scenario with this seed, by default the scenario's first seed."""
    return workload_by_seed(scenario)(scenario.run.seed if seed is None else seed)


def server_scenario(
    scenario: Path | None, workload: str | None, variant: str | None, overrides: Sequence[str]
) -> Scenario:
    """Return the scenario of a load test, which uses the tables [workload], [slo] and [run] but not the deployment.

    Args:
        scenario: The scenario's file. If None, ``workload`` and ``overrides`` alone determine the requests.
        workload: A trace's path or a preset's name, instead of the scenario's workload.
        variant: Name of a variant. If None, the first one is used, and all must have the same workload.
    """
    overrides = [*_workload_overrides(workload), *overrides]
    if scenario is None and variant is not None:
        raise InputError(f"variant {variant!r} must be one of a scenario's; name the scenario's file, too")
    if scenario is None:
        return loads(_UNKNOWN_DEPLOYMENT, overrides=overrides)
    effective = {expanded.name: expanded for expanded in load(scenario, overrides).variant_scenarios()}
    if variant is not None and variant not in effective:
        raise InputError(f"{scenario} has no variant {variant!r}; it has {', '.join(effective)}")
    if variant is None and len({expanded.workload.model_dump_json() for expanded in effective.values()}) > 1:
        raise InputError(f"the variants of {scenario} have different workloads; name one: {', '.join(effective)}")
    return effective[variant] if variant is not None else next(iter(effective.values()))


def deployment_of_server(
    scenario: Path | None, workload: str | None, variant: str | None, overrides: Sequence[str]
) -> dict[str, Any] | None:
    """Return the settings of a server's deployment as the scenario describes them, or None without a scenario.

    The settings are stored with the records of a load test. If there are several variants, only settings that all of
    them share are returned. No cost tables are read and no memory is planned.
    """
    if scenario is None:
        return None
    each = []
    for expanded in load(scenario, [*_workload_overrides(workload), *overrides]).variant_scenarios():
        if variant is None or expanded.name == variant:
            (model, gpu), deployed, limits = hardware(expanded), expanded.deployment, expanded.engine
            settings = {"model": model.name, "model_shape": shape_facts(model), "gpu": gpu.name, "gpus": deployed.gpus}
            settings |= deployed.model_dump(include={"tp", "pp", "dp", "ep", "replicas"})
            settings |= limits.model_dump(include={"max_num_seqs", "max_num_batched_tokens", "max_model_len"})
            settings |= {"weight_dtype": deployed.weight_dtype or model.dtype, "policy": expanded.scheduler.policy}
            each.append(settings)
    return {key: value for key, value in each[0].items() if all(one[key] == value for one in each)}


def _workload_overrides(workload: str | None) -> list[str]:
    if workload is None:
        return []
    path = Path(workload).expanduser()
    if path.exists() or path.suffix in {".csv", ".jsonl", ".json", ".parquet", ".gz"}:
        return [f"workload.trace={json.dumps(str(path.resolve()))}"]
    return [f"workload.preset={json.dumps(workload)}"]


_ADVICE = {
    "http 401": "give the right --api-key",
    "http 403": "give the right --api-key",
    "http 404": "check the address and --model",
    "http 408": "lower the load (--request-rate, --concurrency)",
    "http 429": "lower the load (--request-rate, --concurrency)",
    "http 503": "lower the load (--request-rate, --concurrency), or wait until the server is ready",
    "http 4": "send what it accepts: lengths (--isl, --osl) within its limits, or no exact lengths (--no-exact)",
    "http 5": "check the server's log",
    "server error": "check the server's log",
    "malformed": "check that the address is that of an OpenAI-compatible server",
    "stalled": "lower the load, or wait longer for a byte (--stall)",
    "timed out": "lower the load, or wait longer for an answer (--timeout)",
    "empty answer": "check the server's stream, which contains no token, and its log",
}


def advice_on(reason: str, *, exact: bool) -> str:
    """Return advice on requests that failed for a reason. ``exact`` is whether they requested exact output lengths."""
    if reason == "empty answer" and not exact:
        return "request exact lengths (without --no-exact)"  # the model may stop at once
    default = "check whether the server still runs, and its log"
    return _ADVICE.get(reason) or _ADVICE.get(reason[:6]) or default
