"""From what a file says to what it means: aliases resolved, short forms spelled out."""

from __future__ import annotations

from typing import Any

from lengthwise.scenario._axes import axis_name, flat, limit_names
from lengthwise.scenario._problems import Problem

_SECTIONS = {"sla": "slo", "slos": "slo", "traffic": "workload", "variant": "variants"}
_KEYS: dict[str, dict[str, str]] = {
    "workload": {
        "isl": "prompt",
        "input_len": "prompt",
        "prompt_tokens": "prompt",
        "osl": "output",
        "output_len": "output",
        "output_tokens": "output",
        "rate": "request_rate",
        "rate_rps": "request_rate",
        "qps": "request_rate",
        "rps": "request_rate",
        "max_concurrency": "concurrency",
        "num_prompts": "num_requests",
    },
    "deployment": {
        "model_path": "model",
        "hardware": "gpu",
        "system": "gpu",
        "tensor_parallel": "tp",
        "tensor_parallel_size": "tp",
        "pipeline_parallel": "pp",
        "pipeline_parallel_size": "pp",
        "dp": "replicas",
        "data_parallel_size": "replicas",
        "num_replicas": "replicas",
        "dtype": "weight_dtype",
        "kv_cache_dtype": "kv_dtype",
        "num_gpu_blocks": "num_blocks",
        "num_gpu_blocks_override": "num_blocks",
    },
    "engine": {
        "max_batch_size": "max_num_seqs",
        "max_num_tokens": "max_num_batched_tokens",
        "chunk_size": "max_num_batched_tokens",
        "page_size": "block_size",
        "timeout": "timeout_s",
    },
    "scheduler": {
        "name": "policy",
        "scheduling_policy": "rank",
        "routing": "router",
        "bins": "binning",
        "max_wait": "max_wait_s",
        "batch_wait": "batch_wait_s",
        "window": "window_tokens",
    },
    "predictor": {"path": "file", "window": "window_tokens"},
    "slo": {"itl": "tpot", "e2e": "jct", "e2el": "jct", "e2e_latency": "jct", "request_latency": "jct"},
    "run": {"num_seeds": "seeds", "warmup": "warmup_s", "time_limit": "time_limit_s"},
    "search": {
        "goal": "objective",
        "request_rate": "rate",
        "gpus": "max_gpus",
        "slo": "limits",
        "num_seeds": "seeds",
    },
    "length": {"min": "low", "max": "high", "std": "sd", "stddev": "sd"},
}
_KINDS = {
    "length": {"log_normal": "lognormal", "normal": "truncated_normal", "constant": "fixed"},
    "arrivals": {"static": "all_at_once", "burst": "all_at_once"},
}

_NO_TBT = (
    "gaps are pooled over requests and judge none of them; limit tpot, and read TBT in the table; "
    "known in slo are ttft, tpot, jct"
)

_SHORT = {"scheduler": "policy", "predictor": "kind"}

Table = dict[str, Any]


def canonical(raw: Table) -> tuple[Table, list[Problem]]:
    """The same settings under this project's own keys, and what was said twice."""
    problems: list[Problem] = []
    settings = _renamed(raw, _SECTIONS, (), problems)
    for key, value in settings.items():
        if key == "variants" and isinstance(value, list):
            settings[key] = [_variant(v, i, problems) for i, v in enumerate(value)]
        else:
            settings[key] = _section(key, value, (key,), problems)
    return settings, problems


def _variant(raw: Any, index: int, problems: list[Problem]) -> Any:
    if not isinstance(raw, dict):
        return raw
    here = ("variants", str(index))
    nested = _renamed(_undotted(raw), _SECTIONS, here, problems)
    return {key: _section(key, value, (*here, key), problems) for key, value in nested.items()}


def _undotted(raw: Table) -> Table:
    """Quoted keys with dots, as YAML needs them, as nested tables."""
    out: Table = {}
    for key, value in raw.items():
        *tables, leaf = str(key).split(".")
        place = out
        for table in tables:
            inner = place.setdefault(table, {})
            place = inner if isinstance(inner, dict) else {}
        if isinstance(value, dict) and isinstance(place.get(leaf), dict):
            place[leaf].update(value)
        else:
            place[leaf] = value
    return out


def _section(name: str, value: Any, here: tuple[str, ...], problems: list[Problem]) -> Any:
    if name in _SHORT and isinstance(value, str):
        return {_SHORT[name]: value}
    if not isinstance(value, dict) or name not in _KEYS:
        return value
    table = _renamed(value, _KEYS[name], here, problems)
    if name == "slo":
        return _slo(table, here, problems)
    if name == "search":
        return _search(table, here, problems)
    if name != "workload":
        return table
    for key in ("prompt", "output", "arrivals"):
        if key in table:
            table[key] = _kind(key, table[key], (*here, key), problems)
    return table


def _search(table: Table, here: tuple[str, ...], problems: list[Problem]) -> Table:
    """Limits and axes under their dotted names."""
    if isinstance(table.get("limits"), dict):
        table["limits"] = limit_names(table["limits"])
    if isinstance(table.get("space"), dict):
        table["space"] = _axes(table["space"], (*here, "space"), problems)
    if isinstance(table.get("either"), list):
        table["either"] = [
            _axes(own, (*here, "either", str(at)), problems) if isinstance(own, dict) else own
            for at, own in enumerate(table["either"])
        ]
    return table


def _axes(table: Table, here: tuple[str, ...], problems: list[Problem]) -> Table:
    """``tp``, ``deployment.tp`` and ``tensor_parallel`` as "deployment.tp"."""
    axes: Table = {}
    said: dict[str, str] = {}
    for text, values in flat(table).items():
        name = axis_name(text, _KEYS)
        if name in axes:
            problems.append(Problem((*here, text), f"means the same as {said[name]}; keep one of them"))
        axes[name], said[name] = values, text
    return axes


def _kind(key: str, value: Any, here: tuple[str, ...], problems: list[Problem]) -> Any:
    group = "arrivals" if key == "arrivals" else "length"
    if group == "arrivals" and isinstance(value, str):
        value = {"kind": value}
    elif group == "length" and isinstance(value, int | float) and not isinstance(value, bool):
        value = {"kind": "fixed", "tokens": value}
    if not isinstance(value, dict):
        return value
    table = _renamed(value, _KEYS.get(group, {}), here, problems)
    if isinstance(table.get("kind"), str):
        kind = table["kind"].lower().replace("-", "_")
        table["kind"] = _KINDS[group].get(kind, kind)
    return table


def _slo(table: Table, here: tuple[str, ...], problems: list[Problem]) -> Table:
    """``ttft_ms = 200`` as ``ttft = "200ms"``."""
    spelled = {}
    names = {}
    for key, value in table.items():
        if key in ("tbt", "tbt_ms", "tbt_s"):
            problems.append(Problem((*here, key), _NO_TBT))
            continue
        stem, _, unit = key.rpartition("_")
        if unit in ("ms", "s") and isinstance(value, int | float):
            names[key] = _KEYS["slo"].get(stem, stem)
            spelled[key] = f"{value}{unit}"
        else:
            spelled[key] = value
    return _renamed(spelled, names, here, problems)


def _renamed(raw: Table, names: dict[str, str], here: tuple[str, ...], problems: list[Problem]) -> Table:
    out: Table = {}
    said: dict[str, str] = {}
    for key, value in raw.items():
        spelled = str(key).replace("-", "_")
        name = names.get(spelled, spelled)
        if name in out:
            problems.append(Problem((*here, str(key)), f"means the same as {said[name]}; keep one of them"))
        out[name], said[name] = value, str(key)
    return out
