"""The machine-readable summary.

Schema version 1::

    {"format": "lengthwise.results", "version": 1, "results": [
      {"name": str,
       "binding": {"resource": str, "sentence": str, "warning": str},
       "deployment": null where an engine was measured, else
                     {"model", "gpu", "gpus", "tp", "pp", "replicas", "rank", "leave", "batching",
                      "memory", "preempt", "router", "takeover", "binning", "max_wait_s", "batch_wait_s",
                      "max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_blocks",
                      "block_size_tokens", "price_per_hour_usd", "cost_source"},
       "summary": the fields of lengthwise.metrics.Summary by their names, units in the names;
                  an estimate is {"value": number | null, "half_width": number | null} and, where the cost
                  model's error is known, "model_low" and "model_high",
       "notes": [str],
       "model_error": null or {"level": number, "draws": int, "parts": [{"part": str, "log_sd": number}]}; a part
                      that is likelier to be slower by much has "slow_log_sd", too: log_sd of its slow side,
       "beyond_reach": [{"bound", "measured", "largest", "beyond", "of", "unit"}],
       "engine": {str: str},
       "scenario": str}]}

Keys are only ever added within a version. What is not known is null.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from lengthwise.report.binding import binding_of
from lengthwise.report.result import Result, check_results
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.files import write_whole

VERSION = 1
_MODEL = frozenset({"model_low", "model_high", "model_level"})


def write_json(path: Path | str, results: list[Result]) -> None:
    """A JSON file with every number of every variant, under stable keys (see the module).

    Raises:
        InputError: There is no result, or two share a name.
        OutputError: The file cannot be written.
    """
    check_results(results)
    made = {"format": "lengthwise.results", "version": VERSION, "results": [_result(r) for r in results]}
    text = json.dumps(made, indent=2, ensure_ascii=False, allow_nan=False)
    write_whole(path, (text + "\n").encode())


def deployment_facts(deployment: Deployment) -> dict[str, Any]:
    """What ran, as plain values by name."""
    parallel, scheduler, limits = deployment.parallel, deployment.scheduler, deployment.limits
    axes = ("rank", "leave", "batching", "memory", "preempt", "router", "takeover")
    return {
        "model": deployment.model.name,
        "gpu": deployment.gpu.name,
        "gpus": deployment.gpus,
        "tp": parallel.tp,
        "pp": parallel.pp,
        "replicas": parallel.replicas,
        **{axis: _policy_name(getattr(scheduler, axis)) for axis in axes},
        "binning": None if scheduler.binning is None else _policy_name(scheduler.binning),
        "max_wait_s": _finite(scheduler.max_wait_s),
        "batch_wait_s": _finite(scheduler.batch_wait_s),
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_model_len": deployment.max_model_len,
        "kv_blocks": deployment.kv.num_blocks,
        "block_size_tokens": deployment.kv.block_size,
        "price_per_hour_usd": deployment.price_per_hour_usd,
        "cost_source": deployment.cost.source,
    } | _decode_facts(deployment)


def _decode_facts(deployment: Deployment) -> dict[str, Any]:
    """What decodes apart, if anything does."""
    there = deployment.decode
    if there is None:
        return {}
    axes = ("batching", "memory", "preempt", "router")
    return {
        "decode": {
            "gpus": there.parallel.gpus,
            "tp": there.parallel.tp,
            "pp": there.parallel.pp,
            "replicas": there.parallel.replicas,
            **{axis: _policy_name(getattr(there, axis)) for axis in axes},
            "max_num_seqs": there.limits.max_num_seqs,
            "kv_blocks": there.kv.num_blocks,
            "handover_fixed_s": there.kv_transfer.fixed_s,
            "handover_token_s": there.kv_transfer.token_s,
        }
    }


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _policy_name(policy: Any) -> str:
    return policy if isinstance(policy, str) else str(getattr(policy, "name", type(policy).__name__))


def _result(result: Result) -> dict[str, Any]:
    return {
        "name": result.name,
        "binding": dataclasses.asdict(binding_of(result)),
        "deployment": None if result.deployment is None else deployment_facts(result.deployment),
        "summary": plain(dataclasses.asdict(result.summary)),
        "notes": list(result.notes),
        "model_error": _model_error(result),
        "beyond_reach": [dataclasses.asdict(one) for one in result.out_of_range],
        "engine": dict(result.engine),
        "scenario": result.scenario_text,
    }


def _model_error(result: Result) -> dict[str, Any] | None:
    if not result.model_draws or result.deployment is None:
        return None
    told = [dataclasses.asdict(error) for error in result.deployment.cost.errors]
    parts = [{key: value for key, value in part.items() if value is not None} for part in told]
    return {"level": result.summary.model_level, "draws": result.model_draws, "parts": parts}


def plain(value: Any) -> Any:
    """The same tree of what JSON knows; numbers that are not finite become null.

    What is said of the cost model's error is left out where nothing is known of it.
    """
    if isinstance(value, dict):
        told = {key: item for key, item in value.items() if key not in _MODEL or math.isfinite(item)}
        return {key: plain(item) for key, item in told.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value
