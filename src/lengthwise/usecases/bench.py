"""The requests of a scenario alone, for a server that is there already."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lengthwise.config.scenario import Scenario, load, loads
from lengthwise.config.variants import hardware
from lengthwise.config.workload import per_seed
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import shape_facts
from lengthwise.schema.workload import Workload

_NOBODY = '[deployment]\nmodel = "a server that runs already"\ngpu = "unknown"\n'


def requests(scenario: Scenario, seed: int | None = None) -> Workload:
    """The requests that a scenario simulates with this seed (default: its first); nothing is deployed.

    Raises:
        InputError: A preset, a trace or a predictor cannot be used.
    """
    model = scenario.deployment.model
    drawn = per_seed(scenario.workload, scenario.folder, scenario.predictor, model)
    return drawn(scenario.run.seed if seed is None else seed)


def asked_of_server(
    scenario: Path | None, workload: str | None, variant: str | None, overrides: Sequence[str]
) -> Scenario:
    """A scenario of which only workload, limits and run count.

    Args:
        scenario: Its file; None: there is none, and ``workload`` says what to send.
        workload: A trace's path or a preset's name; wins over the scenario's.
        variant: Which of the scenario's; None: the settings that all share, where they have one workload.
        overrides: Assignments as of ``--set``.

    Raises:
        InputError: Neither says what to send, a value cannot be used, or there is no such variant.
    """
    overrides = [*_source(workload), *overrides]
    if scenario is None and variant is not None:
        raise InputError(f"variant {variant!r} must be one of a scenario's; name the scenario's file, too")
    if scenario is None:
        return loads(_NOBODY, overrides=overrides)
    whole = load(scenario, overrides)
    sides = {side.name: side for side in whole.effective()}
    if variant is not None and variant not in sides:
        raise InputError(f"{scenario} has no variant {variant!r}; it has {', '.join(sides)}")
    if variant is None and len({side.workload.model_dump_json() for side in sides.values()}) > 1:
        raise InputError(f"the variants of {scenario} have different workloads; name one: {', '.join(sides)}")
    return sides[variant] if variant is not None else next(iter(sides.values()))


def deployment_of_server(
    scenario: Path | None, workload: str | None, variant: str | None, overrides: Sequence[str]
) -> dict[str, Any] | None:
    """What a scenario says that is behind the server, as records keep it; of several variants what all share.

    Nothing is deployed: no cost tables are read and no memory is planned. None where there is no scenario.

    Raises:
        InputError: The model or the GPU is not known.
    """
    if scenario is None:
        return None
    sides = load(scenario, [*_source(workload), *overrides]).effective()
    each = [_message(side) for side in sides if variant is None or side.name == variant]
    return {key: value for key, value in each[0].items() if all(one[key] == value for one in each)}


def _message(scenario: Scenario) -> dict[str, Any]:
    model, gpu, on = *hardware(scenario), scenario.deployment
    limits = scenario.engine
    return {
        "model": model.name,
        "model_shape": shape_facts(model),
        "gpu": gpu.name,
        "gpus": on.tp * on.pp * on.replicas,
        "tp": on.tp,
        "pp": on.pp,
        "replicas": on.replicas,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_model_len": limits.max_model_len,
        "weight_dtype": on.weight_dtype or model.dtype,
        "policy": scenario.scheduler.policy,
    }


def _source(workload: str | None) -> list[str]:
    if workload is None:
        return []
    path = Path(workload).expanduser()
    if path.exists() or path.suffix in {".csv", ".jsonl", ".json", ".parquet", ".gz"}:
        return [f"workload.trace={json.dumps(str(path.resolve()))}"]
    return [f"workload.preset={json.dumps(workload)}"]
