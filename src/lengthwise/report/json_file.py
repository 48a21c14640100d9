"""The machine-readable files.

Every file is ``{"format": "lengthwise.NAME", "version": 1, ...}``. Keys are only ever added within a version; unknown
numbers are null. Units are in the names. The file of simulated or measured variants::

    {"format": "lengthwise.results", "version": 1, "results": [
      {"name": str,
       "binding": {"resource": str, "description": str, "warning": str},
       "deployment": null where an engine was measured, else the values of ``deployment_facts``,
       "summary": the fields of lengthwise.metrics.Summary; ``Summary.intervals`` is flattened: "intervals" is its
                  source, "level" and "model_level" are keys of the summary. An estimate is
                  {"value": number | null, "half_width": number | null} and, where the cost model's error is known,
                  "model_low" and "model_high"; the key "prefix_cache" appears where a variant caches shared prefixes,
       "prefix_cache_over_time": with that key, {"time_s": [number], "hit_rate": [number | null]} of the first seed,
       "notes": [str],
       "model_error": null or {"level": number, "draws": int, "parts": [{"part": str, "log_sd": number}]};
                      a part whose slow side is wider also has "slow_log_sd",
       "beyond_reach": [{"bound", "measured", "largest", "out_of_range", "of", "unit"}],
       "engine": {str: str},
       "scenario": str}]}
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.metrics import Summary, hit_rate_over_time
from lengthwise.report.binding import bottleneck_of
from lengthwise.report.result import Result, check_results, shows_prefix_cache
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.files import write_atomic

VERSION = 1
TIME_BINS = 100  # of the hit rate over time


def json_text(name: str, fields: Mapping[str, Any]) -> str:
    """Return the text of a JSON file with these fields.

    The key ``format`` is ``lengthwise.NAME``, by which readers recognise the file. Numbers that are infinite or unknown
    become null.
    """
    document = {"format": f"lengthwise.{name}", "version": VERSION, **plain(fields)}
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False, default=str) + "\n"


def results_json(results: list[Result]) -> str:
    """Return every number of every variant as the text of a JSON file.

    Raises InputError if there is no result, or if two variants have the same name.
    """
    check_results(results)
    has_prefix_cache = shows_prefix_cache(results)
    made = [_result(result, has_prefix_cache=has_prefix_cache) for result in results]
    return json_text("results", {"results": made})


def write_json(path: Path | str, results: list[Result]) -> None:
    """Write ``results_json`` to a file. Raises OutputError if it cannot be written."""
    write_atomic(path, results_json(results).encode())


def _result(result: Result, *, has_prefix_cache: bool) -> dict[str, Any]:
    model_error = None
    if result.model_draws and result.deployment is not None:
        errors = [dataclasses.asdict(error) for error in result.deployment.cost.evidence.errors]
        parts = [{key: value for key, value in part.items() if value is not None} for part in errors]
        model_error = {"level": result.summary.intervals.model_level, "draws": result.model_draws, "parts": parts}
    summary, over_time = _summary(result.summary), {}
    if not has_prefix_cache:
        summary.pop("prefix_cache")
    elif result.summary.prefix_cache is not None:
        edges_s = np.linspace(0.0, result.records.end_s, TIME_BINS + 1)
        hit_rate = hit_rate_over_time(result.records.requests, edges_s)
        over_time = {"prefix_cache_over_time": {"time_s": (edges_s[:-1] + edges_s[1:]) / 2, "hit_rate": hit_rate}}
    return {
        "name": result.name,
        "binding": bottleneck_of(result),
        "deployment": None if result.deployment is None else deployment_facts(result.deployment),
        "summary": summary,
        **plain(over_time),
        "notes": result.notes,
        "model_error": model_error,
        "beyond_reach": result.extrapolations,
        "engine": result.engine,
        "scenario": result.scenario_text,
    }


def _summary(summary: Summary) -> dict[str, Any]:
    fields = plain(summary)
    intervals = fields.pop("intervals")
    return {**fields, "intervals": intervals.pop("source"), **intervals}


def deployment_facts(deployment: Deployment) -> dict[str, Any]:
    """Return a deployment's model, hardware, policies and limits as a mapping of plain values."""
    parallel, scheduler, limits = deployment.parallel, deployment.scheduler, deployment.limits
    axes = ("rank", "victim", "batching", "memory", "preemption_mode", "router", "preemption")
    properties: dict[str, Any] = {
        "model": deployment.model.name,
        "gpu": deployment.gpu.name,
        "gpus": deployment.gpus,
        **{name: getattr(parallel, name) for name in ("tp", "pp", "dp", "ep", "replicas")},
        **{axis: _policy_name(getattr(scheduler, axis)) for axis in axes},
        "memory": _policy_name(scheduler.memory) + ", reserved by predicted length" * scheduler.reserve,
        "binning": None if scheduler.binning is None else _policy_name(scheduler.binning),
        **({"max_recompute_share": scheduler.max_recompute_share} if scheduler.reserve else {}),
        **(
            {"max_preemptions_per_request": budget}
            if (budget := scheduler.max_preemptions_per_request) < math.inf
            else {}
        ),
        "max_wait_s": plain(float(scheduler.max_wait_s)),
        "batch_wait_s": plain(float(scheduler.batch_wait_s)),
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_model_len": deployment.max_model_len,
        "kv_blocks": deployment.kv.num_blocks,
        "block_size_tokens": deployment.kv.block_size,
        "price_per_hour_usd": deployment.price_per_hour_usd,
        "cost_source": deployment.cost.evidence.source,
    }
    decode, decode_axes = deployment.decode, ("batching", "memory", "preemption_mode", "router")
    if decode is not None:  # prefill and decode are disaggregated
        properties["decode"] = {
            "gpu": (decode.gpu or deployment.gpu).name,
            **{name: getattr(decode.parallel, name) for name in ("gpus", "tp", "pp", "dp", "ep", "replicas")},
            **{axis: _policy_name(getattr(decode, axis)) for axis in decode_axes},
            "max_num_seqs": decode.limits.max_num_seqs,
            "kv_blocks": decode.kv.num_blocks,
            "cost_source": decode.cost.evidence.source,
            "transfer_fixed_s": decode.kv_transfer.fixed_s,
            "transfer_token_s": decode.kv_transfer.token_s,
            "transfer_layers": decode.kv_transfer.layers,
            "link_sharing": decode.kv_transfer.sharing,
            "links_at_once": decode.kv_transfer.links_at_once,
            "kv_transfer_timeout_s": decode.kv_transfer.timeout_s,
            "kv_load_failure_policy": decode.kv_transfer.kv_load_failure_policy,
            "max_local_prefill_length": decode.max_local_prefill_length,
            "max_prefill_queue_size": decode.max_prefill_queue_size,
        }
    if deployment.groups:
        properties["groups"] = [deployment_facts(group) for group in deployment.replica_groups]
    return properties


def _policy_name(policy: Any) -> str:
    return policy if isinstance(policy, str) else str(getattr(policy, "name", type(policy).__name__))


def plain(value: Any) -> Any:
    """Convert dataclasses, arrays and mappings to values for JSON. Infinite and unknown numbers become None.

    Unknown ends of the cost model's intervals are left out.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        model = ("model_low", "model_high", "model_level")
        return {
            key: plain(item) for key, item in value.items() if key not in model or item is None or not math.isnan(item)
        }
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value
