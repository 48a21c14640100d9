"""Cost tables to a file and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.cost.provenance import KEY, MadeFor, read_npz, refuse, told_in, write_npz
from lengthwise.cost.vidur_format import ONCE_A_LAYER, vidur_tables
from lengthwise.schema.cost_tables import (
    MERGED,
    PER_REQUEST,
    AttentionRule,
    CostTables,
    FitError,
    Floats,
    Front,
    PartError,
    Reach,
)
from lengthwise.schema.errors import OutputError, ProfileError
from lengthwise.schema.specs import ModelSpec

FORMAT = "lengthwise-cost-tables"
VERSION = 1

_BY_TOKENS = ("layer_s", "comm_s", "first_s", "send_s")
_BY_SEQS = ("head_s", "host_s")
_ATTENTION = ("prefill_s", "decode_s")
_SECONDS = (*_BY_TOKENS, *_BY_SEQS, *_ATTENTION)
_REACH = tuple(field.name for field in fields(Reach))
_OTHER = "other_"
_RULE = ("rule_kind", "rule_step_tokens", "rule_merge_factor")


def save(tables: CostTables, path: Path | str, made_for: MadeFor | None = None) -> None:
    """An npz at ``path`` that ``load`` reads back bit for bit; written whole or not at all.

    ``made_for`` is what the tables are of: kept with them, so that others are refused.

    Raises:
        ProfileError: The tables break a law of ``check``.
        OutputError: The file cannot be written.
    """
    check(tables, "the tables to save")
    write_npz(path, to_arrays(tables) | ({} if made_for is None else {KEY: made_for.to_text()}))


def load(path: Path | str) -> CostTables:
    """The tables that ``save`` wrote.

    Raises:
        ProfileError: The file is missing, is no npz of ours, is of a newer version, or its tables
            break a law of ``check``.
    """
    return from_arrays(read_npz(path), str(path))


def from_tables(path: Path | str, model: ModelSpec, pp: int = 1) -> CostTables:
    """Cost tables from an npz of ours or of Vidur's prediction tables, told apart by their keys.

    ``model`` and ``pp`` cut Vidur's tables into stages; ours know their stages, and must match.

    Raises:
        ProfileError: The file is neither, cannot be read, or is for other stages or another model.
    """
    arrays = read_npz(path)
    if "format" in arrays:
        tables = from_arrays(arrays, str(path))
        told = told_in(arrays, path)
        if told is not None:
            refuse(path, told.model_differences(model))
        stages = tables.stage_layers.tolist()
        if len(stages) != pp or sum(stages) != model.layers:
            raise ProfileError(
                f"{path} is for stages of {stages} layers; {model.name} with pp={pp} needs {pp} "
                f"that add up to {model.layers}. Save tables for this deployment."
            )
        return tables
    if ONCE_A_LAYER[0] in arrays:
        return vidur_tables(path, model, pp)
    raise ProfileError(
        f"{path} must hold saved cost tables (key 'format') or Vidur's prediction tables "
        f"(key {ONCE_A_LAYER[0]!r}); its keys are {', '.join(sorted(arrays)) or 'none'}"
    )


def check(tables: CostTables, where: str) -> None:
    """Nothing, if every entry is finite and not negative and the tables have the shapes they must.

    Raises:
        ProfileError: Names the table and the first bad entry.
    """
    for name in _SECONDS:
        _check_seconds(getattr(tables, name), 2 if name in _ATTENTION else 1, f"{where}: {name}")
    for group in (_BY_TOKENS, _BY_SEQS):
        lengths = {name: len(getattr(tables, name)) for name in group}
        if len(set(lengths.values())) > 1:
            raise ProfileError(f"{where}: {', '.join(group)} must be of one length; they are {lengths}")
    if tables.beside_prompts is not None:
        _check_seconds(tables.beside_prompts, 2, f"{where}: beside_prompts")
        if tables.beside_prompts.shape != tables.decode_s.shape:
            raise ProfileError(f"{where}: beside_prompts must have the shape of decode_s")
    stages, rule = tables.stage_layers, tables.rule
    if stages.ndim != 1 or len(stages) < 1 or (stages < 1).any():
        raise ProfileError(f"{where}: stage_layers must be a layer or more a stage; it is {stages}")
    if rule.kind not in (PER_REQUEST, MERGED) or rule.step_tokens < 1 or not rule.merge_factor >= 1:
        raise ProfileError(f"{where}: the attention rule must be one of ours; it is {rule}")
    if not all(0 <= seconds < float("inf") for seconds in (tables.front.request_s, tables.front.queue_s)):
        raise ProfileError(f"{where}: front must be finite seconds from 0; it is {tables.front}")
    if not 0 <= tables.masked_s < float("inf"):
        raise ProfileError(f"{where}: masked_s must be finite seconds from 0; it is {tables.masked_s}")
    _check_other(tables, where)


def _check_other(tables: CostTables, where: str) -> None:
    other, marks = tables.other, tables.stage_other
    if (other is None) != (marks is None):
        raise ProfileError(f"{where}: other and stage_other must be given together")
    if other is None or marks is None:
        return
    if other.other is not None or other.rule != tables.rule:
        raise ProfileError(f"{where}: other must have the same attention rule, and no other of its own")
    if marks.shape != tables.stage_layers.shape or not np.isin(marks, (0, 1)).all():
        raise ProfileError(f"{where}: stage_other must be 0 or 1 for each of the stages; it is {marks}")
    check(other, f"{where}: other")


def _check_seconds(table: Floats, dimensions: int, where: str) -> None:
    if table.ndim != dimensions or min(table.shape) < 2:
        raise ProfileError(f"{where} must have {dimensions} axes of 2 entries or more; its shape is {table.shape}")
    bad = np.argwhere(~np.isfinite(table) | (table < 0))
    if len(bad):
        index = tuple(bad[0].tolist())
        raise ProfileError(f"{where} must be finite and not negative; entry {index} is {table[index]}")


def to_arrays(tables: CostTables) -> dict[str, Any]:
    """The arrays of an npz that holds the tables."""
    rule = tables.rule
    return {
        **{name: getattr(tables, name) for name in (*_SECONDS, "stage_layers")},
        "rule_kind": rule.kind,
        "rule_step_tokens": rule.step_tokens,
        "rule_merge_factor": rule.merge_factor,
        "source": tables.source,
        "format": FORMAT,
        "version": VERSION,
        **_report(tables),
    }


def _report(tables: CostTables) -> dict[str, Any]:
    """What tables need not have: errors, a reach, what sequences do to others, a front, a second degree."""
    told: dict[str, Any] = {}
    if tables.fit:
        names, medians, p95s = zip(*((f.operator, f.median, f.p95) for f in tables.fit), strict=True)
        told |= {"fit_operator": names, "fit_median": medians, "fit_p95": p95s}
    if tables.errors:
        parts, log_sds = zip(*((e.part, e.log_sd) for e in tables.errors), strict=True)
        told |= {"error_part": parts, "error_log_sd": log_sds}
        slow = [np.nan if e.slow_log_sd is None else e.slow_log_sd for e in tables.errors]
        told |= {} if np.isnan(slow).all() else {"error_slow_log_sd": slow}
    reach = [getattr(tables.reach, name) for name in _REACH]
    if any(largest is not None for largest in reach):
        told["reach"] = [-1 if largest is None else largest for largest in reach]
    if tables.beside_prompts is not None:
        told["beside_prompts"] = tables.beside_prompts
    if tables.front != Front():
        told["front"] = [tables.front.request_s, tables.front.queue_s]
    if tables.masked_s:
        told["masked_s"] = tables.masked_s
    if tables.other is not None:
        told |= {f"{_OTHER}{name}": value for name, value in to_arrays(tables.other).items()}
        told["stage_other"] = tables.stage_other
    return told


def _from_told(arrays: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The same, read back; what an older file lacks stays unknown."""
    told: dict[str, Any] = {}
    try:
        if "fit_operator" in arrays:
            rows = zip(*(arrays[f"fit_{key}"].tolist() for key in ("operator", "median", "p95")), strict=True)
            told["fit"] = tuple(FitError(*row) for row in rows)
        if "error_part" in arrays:
            log_sds = arrays["error_log_sd"].tolist()
            slow = np.asarray(arrays.get("error_slow_log_sd", np.full(len(log_sds), np.nan))).tolist()
            errors = zip(arrays["error_part"].tolist(), log_sds, slow, strict=True)
            told["errors"] = tuple(PartError(p, sd, None if np.isnan(s) else s) for p, sd, s in errors)
        if "reach" in arrays:
            told["reach"] = _reach(arrays["reach"].tolist())
        if "front" in arrays:
            request_s, queue_s = arrays["front"].tolist()
            told["front"] = Front(float(request_s), float(queue_s))
        if "masked_s" in arrays:
            told["masked_s"] = float(arrays["masked_s"])
    except (KeyError, TypeError, ValueError) as error:
        raise ProfileError(
            f"{path} must tell errors, fit, masks, reach and front as they were saved: {error}"
        ) from error
    if "beside_prompts" in arrays:
        told["beside_prompts"] = np.ascontiguousarray(arrays["beside_prompts"], dtype=np.float64)
    if "stage_other" in arrays:
        own = {name.removeprefix(_OTHER): arrays[name] for name in arrays if name.startswith(_OTHER)}
        told["other"] = from_arrays(own, f"{path}: other")
        told["stage_other"] = np.ascontiguousarray(arrays["stage_other"], dtype=np.int64)
    return told


def _reach(largest: list[float]) -> Reach:
    """The reach that was saved; older files keep no prefix, and one of prompts measured whole as a context of 0."""
    known = [int(most) if most >= 0 else None for most in largest]
    if len(known) == len(_REACH) - 1:
        whole = known[_REACH.index("context")] == 0
        known.append(0 if whole else None)
        return replace(Reach(*known), context=None) if whole else Reach(*known)
    return Reach(**dict(zip(_REACH, known, strict=True)))


def from_arrays(arrays: Mapping[str, Any], path: str) -> CostTables:
    """The tables in an npz that was read from ``path``.

    Raises:
        ProfileError: As for ``load``.
    """
    missing = {*_SECONDS, *_RULE, "stage_layers", "source", "format", "version"} - set(arrays)
    if missing or str(arrays["format"]) != FORMAT:
        raise ProfileError(f"{path} must hold saved cost tables; it lacks {', '.join(sorted(missing)) or FORMAT}")
    if int(arrays["version"]) != VERSION:
        raise ProfileError(
            f"{path} must be of version {VERSION}; it is of {int(arrays['version'])}. "
            "Save the tables again with this release."
        )
    seconds: dict[str, Any] = {n: np.ascontiguousarray(arrays[n], dtype=np.float64) for n in _SECONDS}
    tables = CostTables(
        **seconds,
        stage_layers=np.ascontiguousarray(arrays["stage_layers"], dtype=np.int64),
        rule=AttentionRule(
            int(arrays["rule_kind"]), int(arrays["rule_step_tokens"]), float(arrays["rule_merge_factor"])
        ),
        source=str(arrays["source"]),
        **_from_told(arrays, path),
    )
    check(tables, path)
    return tables


@dataclass(frozen=True)
class OperatorFit:
    """How well an operator's unseen rows are predicted: relative errors over ``rows`` rows."""

    name: str
    rows: int
    median_error: float
    p95_error: float


@dataclass(frozen=True)
class RegionFit:
    """One estimator's relative errors on an operator's unseen rows in one region.

    ``region`` is "small", "medium", "large" (thirds, between the measured points), "inside" (all three) or
    "beyond" (the largest third, told by the rest: what extrapolation costs).
    """

    operator: str
    estimator: str
    region: str
    rows: int
    median_error: float
    p95_error: float


@dataclass(frozen=True)
class FitReport:
    """Cross-validated errors by operator; ``method`` says on which rows ("5-fold", "out of bag").

    Attributes:
        estimator: What was asked for.
        method: How the rows that were not seen were chosen.
        operators: The errors of the estimator that the tables use.
        compared: Every estimator that was tried, by operator and region.
        picked: (operator, estimator) of the tables.
        filled: What the profile lacks and where it was taken from.
        notes: What a reader must know: extrapolation, rows left out, how far sums are off.
    """

    estimator: str
    method: str
    operators: tuple[OperatorFit, ...]
    compared: tuple[RegionFit, ...] = ()
    picked: tuple[tuple[str, str], ...] = ()
    filled: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


CACHE_VERSION = 7


def cache_path(cache: Path | str, files: Iterable[Path], arguments: tuple[Any, ...], kind: str = "vidur") -> Path:
    """Where the result for these files and arguments is kept; ``cache`` "user" is platformdirs' folder."""
    digest = hashlib.sha256(repr((CACHE_VERSION, _versions(), arguments)).encode())
    for path in files:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return _cache_folder(cache) / f"{kind}-{digest.hexdigest()[:32]}.npz"


def _cache_folder(cache: Path | str) -> Path:
    if cache != "user":
        return Path(cache)
    from platformdirs import user_cache_path

    return user_cache_path("lengthwise") / "profiles"


def _versions() -> list[str]:
    found = []
    for package in ("lengthwise", "numpy", "scipy", "scikit-learn"):
        with suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return found


def read_cache(path: Path) -> tuple[CostTables, FitReport] | None:
    """What was stored, or None: a file that is missing or damaged is built again."""
    with suppress(ProfileError, KeyError):
        arrays = read_npz(path)
        rows = zip(*(arrays[f"report_{key}"].tolist() for key in ("name", "rows", "median", "p95")), strict=True)
        told = json.loads(str(arrays["report"]))
        report = FitReport(
            str(arrays["report_estimator"]),
            str(arrays["report_method"]),
            tuple(OperatorFit(*row) for row in rows),
            compared=tuple(RegionFit(*row) for row in told["compared"]),
            picked=tuple((operator, estimator) for operator, estimator in told["picked"]),
            filled=tuple(told["filled"]),
            notes=tuple(told["notes"]),
        )
        return from_arrays(arrays, str(path)), report
    return None


def write_cache(path: Path, tables: CostTables, report: FitReport) -> None:
    """Stores a result; a cache that cannot be written is no reason to fail."""
    names, rows, medians, p95s = ([row[i] for row in map(astuple, report.operators)] for i in range(4))
    told = {
        "compared": [astuple(fit) for fit in report.compared],
        "picked": report.picked,
        "filled": report.filled,
        "notes": report.notes,
    }
    arrays = to_arrays(tables) | {"report_estimator": report.estimator, "report_method": report.method}
    arrays |= {"report_name": names, "report_rows": rows, "report_median": medians, "report_p95": p95s}
    arrays["report"] = json.dumps(told)
    with suppress(OutputError, OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_npz(path, arrays)
