"""Saves and loads cost tables, and caches fitted tables with the reports of their fits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.cost.provenance import (
    KEY,
    MadeFor,
    parse_made_for,
    provenance_shape,
    read_npz,
    require_no_differences,
    write_npz,
)
from lengthwise.cost.vidur_format import ONCE_A_LAYER, vidur_tables
from lengthwise.schema.cost_tables import (
    MERGED,
    PER_REQUEST,
    AttentionRule,
    CostEvidence,
    CostTables,
    FitError,
    Front,
    OtherDegree,
    PartError,
    Reach,
)
from lengthwise.schema.errors import OutputError, ProfileError
from lengthwise.schema.specs import ModelSpec

FORMAT = "lengthwise-cost-tables"
VERSION = 1

_BY_TOKENS = ("layer_s", "comm_s", "embedding_s", "send_s")
_BY_SEQS = ("head_s", "host_s")
_ATTENTION = ("prefill_s", "decode_s")
_SECONDS = (*_BY_TOKENS, *_BY_SEQS, *_ATTENTION)
_OPTIONAL = ("beside_prompts", "shared_s")
_REACH = tuple(field.name for field in fields(Reach))
_OTHER = "other_"


def save(tables: CostTables, path: Path | str, made_for: MadeFor | None = None) -> None:
    """Write cost tables to an npz file for ``load``.

    The tables may only be used for the deployment ``made_for``. With None, the file names no deployment. Raises
    ProfileError if the tables are invalid, and OutputError if the file cannot be written.
    """
    check(tables, "the tables to save")
    write_npz(
        path, to_arrays(tables) | ({} if made_for is None else {KEY: json.dumps(asdict(made_for), sort_keys=True)})
    )


def load(path: Path | str) -> CostTables:
    """Read tables that ``save`` wrote. Raises ProfileError for another file or version, or for invalid tables."""
    return from_arrays(read_npz(path), str(path))


def from_tables(path: Path | str, model: ModelSpec, pp: int = 1) -> CostTables:
    """Read cost tables that ``save`` wrote, or Vidur's prediction tables.

    Raises ProfileError if the file has no such tables, or tables of another model or another ``pp``.
    """
    arrays = read_npz(path)
    if "format" in arrays:
        tables = from_arrays(arrays, str(path))
        if (made_for := parse_made_for(arrays, path)) is not None:
            require_no_differences(path, made_for.model_differences(model.name, provenance_shape(model)))
        stages = tables.stage_layers.tolist()
        if len(stages) != pp or sum(stages) != model.layers:
            needed = f"{model.name} with pp={pp} needs {pp} that add up to {model.layers}"
            raise ProfileError(f"{path} is for stages of {stages} layers; {needed}. Save tables for this deployment.")
        return tables
    if ONCE_A_LAYER[0] in arrays:
        return vidur_tables(path, model, pp)
    raise ProfileError(
        f"{path} must hold saved cost tables (key 'format') or Vidur's prediction tables "
        f"(key {ONCE_A_LAYER[0]!r}); its keys are {', '.join(sorted(arrays)) or 'none'}"
    )


def check(tables: CostTables, where: str) -> None:  # noqa: C901, PLR0912 - one law after another
    """Raise ProfileError unless every entry is finite and not negative, and the shapes agree."""
    seconds = {name: getattr(tables, name) for name in (*_SECONDS, *_OPTIONAL)}
    for name, table in seconds.items():
        if table is None:
            continue
        axes = 2 if name in (*_ATTENTION, "beside_prompts") else 1
        if table.ndim != axes or min(table.shape) < 2:
            shape = f"{axes} axes of 2 entries or more; its shape is {table.shape}"
            raise ProfileError(f"{where}: {name} must have {shape}")
        if len(bad := np.argwhere(~np.isfinite(table) | (table < 0))):
            index = tuple(bad[0].tolist())
            raise ProfileError(f"{where}: {name} must be finite and not negative; entry {index} is {table[index]}")
    for group in (_BY_TOKENS, _BY_SEQS):
        lengths = {name: len(getattr(tables, name)) for name in group}
        if len(set(lengths.values())) > 1:
            raise ProfileError(f"{where}: {', '.join(group)} must be of one length; they are {lengths}")
    if tables.beside_prompts is not None and tables.beside_prompts.shape != tables.decode_s.shape:
        raise ProfileError(f"{where}: beside_prompts must have the shape of decode_s")
    stages, rule, front = tables.stage_layers, tables.rule, tables.front
    if stages.ndim != 1 or len(stages) < 1 or (stages < 1).any():
        raise ProfileError(f"{where}: stage_layers must be a layer or more a stage; it is {stages}")
    if rule.kind not in (PER_REQUEST, MERGED) or rule.step_tokens < 1 or not rule.merge_factor >= 1:
        raise ProfileError(f"{where}: the attention rule must be PER_REQUEST or MERGED; it is {rule}")
    if not all(0 <= value < float("inf") for value in (front.request_s, front.serial_s)):
        raise ProfileError(f"{where}: front must be finite seconds from 0; it is {front}")
    if not 0 <= tables.masked_s < float("inf"):
        raise ProfileError(f"{where}: masked_s must be finite seconds from 0; it is {tables.masked_s}")
    if tables.other is None:
        return
    other, is_other = tables.other.tables, tables.other.stages
    if other.other is not None or other.rule != rule:
        raise ProfileError(f"{where}: other must have the same attention rule, and no other of its own")
    if is_other.shape != stages.shape or not np.isin(is_other, (0, 1)).all():
        raise ProfileError(f"{where}: stage_other must be 0 or 1 for each of the stages; it is {is_other}")
    check(other, f"{where}: other")


def to_arrays(tables: CostTables) -> dict[str, Any]:
    """Return these tables as the arrays of an npz file, without the parts that are unknown or not used."""
    rule, front = tables.rule, tables.front
    arrays: dict[str, Any] = {
        **{name: getattr(tables, name) for name in (*_SECONDS, "stage_layers")},
        **{f"rule_{name}": getattr(rule, name) for name in ("kind", "step_tokens", "merge_factor")},
        **_evidence_arrays(tables.evidence),
        "format": FORMAT,
        "version": VERSION,
    }
    arrays |= {name: of for name in _OPTIONAL if (of := getattr(tables, name)) is not None}
    arrays |= {} if front == Front() else {"front": [front.request_s, front.serial_s]}
    arrays |= {"masked_s": tables.masked_s} if tables.masked_s else {}
    if tables.other is not None:
        arrays |= {f"{_OTHER}{name}": value for name, value in to_arrays(tables.other.tables).items()}
        arrays["stage_other"] = tables.other.stages
    return arrays


def _evidence_arrays(evidence: CostEvidence) -> dict[str, Any]:
    arrays: dict[str, Any] = {"source": evidence.source}
    if evidence.fit:
        names, medians, p95s = zip(*((f.operator, f.median, f.p95) for f in evidence.fit), strict=True)
        arrays |= {"fit_operator": names, "fit_median": medians, "fit_p95": p95s}
    if evidence.errors:
        parts, log_sds = zip(*((e.part, e.log_sd) for e in evidence.errors), strict=True)
        arrays |= {"error_part": parts, "error_log_sd": log_sds}
        slow = [np.nan if e.slow_log_sd is None else e.slow_log_sd for e in evidence.errors]
        arrays |= {} if np.isnan(slow).all() else {"error_slow_log_sd": slow}
    reach = [getattr(evidence.reach, name) for name in _REACH]
    if any(largest is not None for largest in reach):
        arrays["reach"] = [-1 if largest is None else largest for largest in reach]
    return arrays


def from_arrays(arrays: Mapping[str, Any], path: str) -> CostTables:
    """Return the tables in the arrays of an npz file, as ``load`` does. Parts that an older file lacks are unknown."""
    rule = ("rule_kind", "rule_step_tokens", "rule_merge_factor")
    missing = {*_SECONDS, *rule, "stage_layers", "source", "format", "version"} - set(arrays)
    if missing or str(arrays["format"]) != FORMAT:
        raise ProfileError(f"{path} must hold saved cost tables; it lacks {', '.join(sorted(missing)) or FORMAT}")
    if int(arrays["version"]) != VERSION:
        found = f"it is of {int(arrays['version'])}. Save the tables again with this release."
        raise ProfileError(f"{path} must be of version {VERSION}; {found}")
    values: dict[str, Any] = {name: np.ascontiguousarray(arrays[name], dtype=np.float64) for name in _SECONDS}
    try:
        values["evidence"] = _evidence(arrays)
        if "front" in arrays:
            request_s, serial_s = map(float, arrays["front"].tolist())
            values["front"] = Front(request_s, serial_s)
        if "masked_s" in arrays:
            values["masked_s"] = float(arrays["masked_s"])
    except (KeyError, TypeError, ValueError) as error:
        parts = "errors, fit, masks, reach and front"
        raise ProfileError(f"{path} must hold {parts} as they were saved: {error}") from error
    given = [name for name in _OPTIONAL if name in arrays]
    values |= {name: np.ascontiguousarray(arrays[name], dtype=np.float64) for name in given}
    if "stage_other" in arrays:
        other = {name.removeprefix(_OTHER): arrays[name] for name in arrays if name.startswith(_OTHER)}
        stages = np.ascontiguousarray(arrays["stage_other"], dtype=np.int64)
        values["other"] = OtherDegree(from_arrays(other, f"{path}: other"), stages)
    kind, step_tokens, merge_factor = (arrays[name] for name in rule)
    tables = CostTables(
        **values,
        stage_layers=np.ascontiguousarray(arrays["stage_layers"], dtype=np.int64),
        rule=AttentionRule(int(kind), int(step_tokens), float(merge_factor)),
    )
    check(tables, path)
    return tables


def _evidence(arrays: Mapping[str, Any]) -> CostEvidence:
    values: dict[str, Any] = {}
    if "fit_operator" in arrays:
        rows = zip(*(arrays[f"fit_{key}"].tolist() for key in ("operator", "median", "p95")), strict=True)
        values["fit"] = tuple(FitError(*row) for row in rows)
    if "error_part" in arrays:
        log_sds = arrays["error_log_sd"].tolist()
        slow = np.asarray(arrays.get("error_slow_log_sd", np.full(len(log_sds), np.nan))).tolist()
        errors = zip(arrays["error_part"].tolist(), log_sds, slow, strict=True)
        values["errors"] = tuple(PartError(p, sd, None if np.isnan(s) else s) for p, sd, s in errors)
    if "reach" in arrays:
        values["reach"] = _reach(arrays["reach"].tolist())
    return CostEvidence(str(arrays["source"]), **values)


def _reach(saved: list[float]) -> Reach:
    known = [int(largest) if largest >= 0 else None for largest in saved]
    if len(known) == len(_REACH) - 1:
        # Older files have no prefix; a context of 0 there means that prompts were measured without a cached prefix.
        no_prefix = known[_REACH.index("context")] == 0
        reach = Reach(**dict(zip(_REACH, [*known, 0 if no_prefix else None], strict=True)))
        return replace(reach, context=None) if no_prefix else reach
    return Reach(**dict(zip(_REACH, known, strict=True)))


@dataclass(frozen=True)
class OperatorFit:
    """Relative errors of the fit of an operator on its held-out rows."""

    name: str
    rows: int
    median_error: float
    p95_error: float


@dataclass(frozen=True)
class RegionFit:
    """Relative errors of one estimator on the held-out rows of an operator in one region."""

    operator: str
    estimator: str
    region: str  # "small", "medium" or "large" third, "inside" (all of them), or "out_of_range" (beyond the rest)
    rows: int
    median_error: float
    p95_error: float


@dataclass(frozen=True)
class FitReport:
    """The report of a fit: its cross-validated errors and notes."""

    estimator: str  # the requested estimator
    method: str  # how rows were held out, such as "5-fold" or "out of bag"
    operators: tuple[OperatorFit, ...]  # errors of the estimators that the tables use
    compared: tuple[RegionFit, ...] = ()  # errors of every estimator that was tried, by operator and region
    picked: tuple[tuple[str, str], ...] = ()  # (operator, estimator that the tables use)
    filled: tuple[str, ...] = ()  # operators that the profile lacks, and where their times come from
    notes: tuple[str, ...] = ()  # extrapolations, rows left out, errors of sums


CACHE_VERSION = 10  # increases when a fit of the same files and arguments gives other tables


def cache_path(cache: Path | str, files: Iterable[Path], arguments: tuple[Any, ...], kind: str = "vidur") -> Path:
    """Return the path of the cache file of tables that were built from ``files`` and ``arguments``.

    The path depends on the content of the files and the versions of packages, so that no outdated tables are read.
    """
    versions = []
    for package in ("lengthwise", "numpy", "scipy", "scikit-learn"):
        with suppress(PackageNotFoundError):
            versions.append(f"{package} {version(package)}")
    digest = hashlib.sha256(repr((CACHE_VERSION, versions, arguments)).encode())
    for path in files:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return cache_folder(cache) / f"{kind}-{digest.hexdigest()[:32]}.npz"


def cache_folder(cache: Path | str) -> Path:
    """Return the folder of cached tables. "user" is the folder that platformdirs gives."""
    if cache != "user":
        return Path(cache)
    from platformdirs import user_cache_path

    return user_cache_path("lengthwise") / "profiles"


def cached(path: Path | None, build: Callable[[], tuple[CostTables, FitReport]]) -> tuple[CostTables, FitReport]:
    """Return the tables and the report of a fit from the cache file ``path``. If it is missing, build and store them.

    If ``path`` is None, there is no cache.
    """
    if path is None:
        return build()
    with suppress(ProfileError, KeyError):  # a missing or damaged file is built again
        arrays = read_npz(path)
        saved = json.loads(str(arrays["report"]))
        saved |= {name: tuple(saved[name]) for name in ("filled", "notes")}
        saved["operators"] = tuple(OperatorFit(**fit) for fit in saved["operators"])
        saved["compared"] = tuple(RegionFit(**fit) for fit in saved["compared"])
        saved["picked"] = tuple((operator, estimator) for operator, estimator in saved["picked"])
        return from_arrays(arrays, str(path)), FitReport(**saved)
    tables, report = build()
    arrays = to_arrays(tables) | {"report": json.dumps(asdict(report))}
    with suppress(OutputError, OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_npz(path, arrays)
    return tables, report
