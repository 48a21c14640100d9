"""A profile becomes cost tables and a report of how good they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from lengthwise.cost.estimators.assembly import Assembly, FittedOperators, factors, fit_beside, skewed
from lengthwise.cost.estimators.cross_validation import MULTIPLE, Judged, judge, made_up
from lengthwise.cost.estimators.learners import LEARNERS, apart, joined
from lengthwise.cost.estimators.points import Points, Target, kernel_points, rows_points
from lengthwise.cost.estimators.profile_rows import Source, reach_of, rows_for
from lengthwise.cost.operator_work import kernels_of
from lengthwise.cost.profiles import read_profile
from lengthwise.cost.roofline_tables import LARGEST_KV_TOKENS, HostOverhead
from lengthwise.cost.tables import FitReport, cache_path, check, read_cache, write_cache
from lengthwise.schema.cost_tables import NOT_MEASURED, CostTables, FitError, Floats, Reach, grid_axis
from lengthwise.schema.deployment import EngineLimits, Parallelism
from lengthwise.schema.errors import ProfileError, UnknownNameError
from lengthwise.schema.profile import OPERATOR_PARTS, Profile
from lengthwise.schema.specs import GpuSpec, ModelSpec, NodeSpec

METHOD = (
    "points held out between the outermost of every axis (edges never count), told by the estimator that the other "
    "half of them chose; and the largest third told by the rest"
)
ESTIMATORS = (*MULTIPLE, *LEARNERS)
_APART = ("mixed", "gemm", "comm", "send")


def fit_profile(
    profile: Profile,
    model: ModelSpec,
    gpu: GpuSpec,
    node: NodeSpec,
    parallel: Parallelism,
    limits: EngineLimits,
    max_model_len: int,
    *,
    estimator: str = "auto",
    backend: str = "",
    host: HostOverhead = HostOverhead(),
) -> tuple[CostTables, FitReport]:
    """Cost tables (rule PER_REQUEST) from measured operators, and how good the fit is.

    Operators of the model's shard are learnt from their own rows, those of kernels of no model by their
    sizes. Another TP degree, model or GPU than was measured is told by "physics" alone, with more
    than its error there (FAR_FACTORS). What the profile lacks comes from the roofline. ``source`` and the
    report say which is which. A product of one token and a matrix is told as it was measured (``_single``).

    A part's error is ``sum_o w_o sd_o``: ``w_o`` the operator's share of the part's time, ``sd_o`` the root
    mean square of log(measured / said) over its held-out points, or the roofline's own error where that filled it
    in. Where too few points were measured to tell an error, the widest of the part's counts, the roofline's own
    among them, and there is no FitError; nor is there one of what was measured on another GPU, model or TP.

    Args:
        profile: What was measured.
        model: What is served.
        gpu: On what.
        node: What joins the GPUs.
        parallel: How the model is cut.
        limits: Largest step and batch, dtypes of weights and cache.
        max_model_len: Tokens of the longest request.
        estimator: "auto" (the best on held-out points, by operator) or one of ESTIMATORS for all.
        backend: Whose kernels count where an operator was measured with several: a name or a part of it; "" takes
            the one with most rows.
        host: Overhead of the host where the profile has none, and the front, of which no profile tells.

    Raises:
        ProfileError: The profile has no rows that may speak of this deployment; says why.
        MissingExtraError: The forest needs scikit-learn.
        UnknownNameError: There is no such estimator.
        InputError: ``tp`` does not divide the heads, or there are more stages than layers.
    """
    if estimator not in ESTIMATORS:
        raise UnknownNameError("estimator", estimator, ESTIMATORS)
    target = Target(model, gpu, node, parallel, limits, max_model_len)
    source = rows_for(profile, target, backend)
    reach = reach_of(source, target)
    notes = list(source.notes)
    shard = _shard(source, target, reach, estimator, notes)
    kernels = _kernels(source, target, estimator)
    if not shard and not kernels:
        raise ProfileError(
            f"the profile {profile.metadata.name} has no operator of {model.name}; it has "
            f"{', '.join(profile.operators) or 'no rows'}"
        )
    assembly = Assembly(target, FittedOperators(target, kernels), shard, kernels, host)
    tables = assembly.tables()
    tables = replace(tables, beside_prompts=_additional(source, target, shard, notes))
    report = _report(estimator, shard, kernels, assembly.filled(), tuple(notes))
    fits = tuple(FitError(o.name, o.median_error, o.p95_error) for o in report.operators)
    told = _source(profile, target, report)
    tables = replace(tables, source=told, fit=fits, reach=reach)
    check(tables, told)
    return tables, report


def _shard(source: Source, target: Target, reach: Reach, estimator: str, notes: list[str]) -> dict[str, Judged]:
    """What is learnt of the model's shard; of the TP degree asked for, where it was measured."""
    found: dict[str, Judged] = {}
    bridged, invented = set(), dict[tuple[int, ...], list[str]]()
    for operator in source.shard.operators:
        if OPERATOR_PARTS[operator] in _APART:
            continue
        rows = source.shard.of(operator)
        exact = source.same and target.parallel.tp in rows.tensor_parallel
        own = rows.where(rows["tp"] == target.parallel.tp) if exact else rows
        points = rows_points(operator, own, source.target)
        if points is None:
            continue
        if not exact and source.same:
            bridged.add(rows.tensor_parallel)
        beyond = _out_of_range(OPERATOR_PARTS[operator], reach, target)
        judged = _evaluated(points, estimator, out_of_range=beyond, carried=_carried(source, target, rows))
        if degrees := own.made_up(operator):
            invented.setdefault(degrees, []).append(operator)
            judged = made_up(judged)
        found[operator] = judged
    for degrees, operators in invented.items():
        told = ", ".join(map(str, degrees))
        notes.append(f"{', '.join(operators)} at TP {told}: {NOT_MEASURED}; no error is told of them")
    for degrees in sorted(bridged):
        measured = ", ".join(map(str, degrees))
        notes.append(f"measured at TP {measured}, carried to TP {target.parallel.tp} by physics")
    return found


def _evaluated(points: Points, estimator: str, *, out_of_range: bool, carried: list[str]) -> Judged:
    """What is learnt of one operator; of a product of this very shard with one token apart."""
    cut = None if carried else apart(points)
    if cut is None:
        return judge(points, estimator, out_of_range=out_of_range, carried=carried)
    single, others = cut
    judged = judge(others, estimator, out_of_range=out_of_range)
    return replace(judged, fit_result=joined(single, others, judged.fit_result), rows=len(points))


def _carried(source: Source, target: Target, rows: Profile) -> list[str]:
    """What the deployment has another of than was measured."""
    other = {
        "tp": target.parallel.tp not in rows.tensor_parallel,
        "model": source.target.model.name != target.model.name,
        "gpu": not source.same_gpu,
    }
    return [what for what, is_other in other.items() if is_other]


def _additional(source: Source, target: Target, shard: Mapping[str, Judged], notes: list[str]) -> Floats | None:
    """How much longer decodes take in steps with prompts, where that tells held-out steps better than a sum."""
    rows = source.shard.of("mixed attention", target.parallel.tp)
    prompts, decodes = shard.get("prefill attention"), shard.get("decode attention")
    if not source.same or prompts is None or decodes is None:
        return None
    unequal = skewed(source.shard.of("decode attention", target.parallel.tp), decodes, target)
    if unequal is not None:
        notes.append(
            f"decodes of unequal lengths take {unequal[1]:+.1%} at the median of {unequal[0]:,} points; not counted"
        )
    found = fit_beside(rows, prompts, decodes, target)
    if found is None:
        return None
    told = f"prompts and decodes in one step: their sum is off by {found.summed:.1%} at the median"
    if found.disaggregated >= found.summed:
        notes.append(told)
        return None
    notes.append(f"{told}, with decodes beside prompts on their own {found.disaggregated:.1%}")
    batch = grid_axis(target.limits.max_num_seqs).astype(np.float64)
    cached = grid_axis(min(target.limits.max_num_seqs * target.max_model_len, LARGEST_KV_TOKENS))
    return factors(found, decodes, batch[:, None], cached.astype(np.float64)[None, :], target)


def _kernels(source: Source, target: Target, estimator: str) -> dict[str, Judged]:
    """What is learnt of kernels of no model; "gemm wide" are products in 16 bits beside narrower ones."""
    found: dict[str, Judged] = {}
    rows = Profile(source.kernels.metadata, source.kernels.columns)
    # Collectives are of no model even when a model's shard was measured with them.
    if source.same_gpu and (source.shard["operator"] == "all-reduce").any():
        found |= _learnt("all-reduce", source.shard.of("all-reduce"), source, target, estimator)
    for operator in rows.operators:
        if _is_needed(operator, target):
            found |= _learnt(operator, rows.of(operator), source, target, estimator)
    return found


def _is_needed(operator: str, target: Target) -> bool:
    """Whether the deployment has such an operator at all."""
    if operator == "fused moe":
        return bool(target.model.ffn.experts)
    if operator == "all-reduce":
        return target.parallel.tp > 1
    if "attention" in operator:
        return not target.model.attention.is_mla and target.share(operator) > 0
    return True


def _learnt(operator: str, rows: Profile, source: Source, target: Target, estimator: str) -> Mapping[str, Judged]:
    kinds = {operator: rows}
    if operator == "gemm":
        kinds = _by_width(rows, target)
    found = {}
    for name, own in kinds.items():
        dtype = "bfloat16" if name == "gemm wide" else target.weight_dtype
        kernels = kernels_of(source.target.gpu, dtype)
        points: Points | None = kernel_points(operator, own.columns, kernels, target.node) if len(own) else None
        if points is not None:
            asked = "tables" if estimator == "monotone" else estimator
            judged = judge(points, asked, out_of_range=False, carried=() if source.same_gpu else ("gpu",))
            found[name] = judged
    return found


def _by_width(rows: Profile, target: Target) -> dict[str, Profile]:
    """GEMM rows of the layers' dtype, and those in 16 bits for what stays wide."""
    wide = np.isin(rows["dtype"], ("", "bfloat16", "bf16", "float16", "fp16", "half"))
    if target.weight_dtype in ("bfloat16", "float16"):
        return {"gemm": rows.where(wide), "gemm wide": rows.where(wide)}
    return {"gemm": rows.where(~wide), "gemm wide": rows.where(wide)}


def _out_of_range(part: str, reach: Reach, target: Target) -> bool:
    """Whether steps of the deployment go beyond what was measured of a part."""
    limits = target.limits
    tokens = max(limits.max_num_batched_tokens, limits.max_num_seqs)
    chunk = min(limits.max_num_batched_tokens, target.max_model_len)
    asked: dict[str, tuple[tuple[int | None, int], ...]] = {
        "layer": ((reach.tokens, tokens),),
        "first": ((reach.tokens, tokens),),
        "prefill": ((reach.chunk, chunk), (reach.prefix, target.max_model_len)),
        "decode": ((reach.seqs, limits.max_num_seqs),),
    }
    return any(measured is not None and measured < most for measured, most in asked.get(part, ()))


def _report(
    estimator: str,
    shard: Mapping[str, Judged],
    kernels: Mapping[str, Judged],
    filled: tuple[str, ...],
    notes: tuple[str, ...],
) -> FitReport:
    judged = [*shard.values(), *(j for name, j in kernels.items() if name != "gemm wide")]
    untold = [j.operator for j in judged if j.log_sd is None and not j.is_made_up]
    if untold:
        notes = (*notes, f"too few points to tell an error of {', '.join(untold)}: the roofline's counts")
    carried = [j.operator for j in judged if j.carried]
    if carried:
        notes = (*notes, f"no errors are told of {', '.join(carried)}: those at the points measured are not those here")
    summaries = [j.summary() for j in judged]
    return FitReport(
        estimator,
        METHOD,
        tuple(one for one in summaries if one is not None),
        compared=tuple(fit for j in judged for fit in j.compared),
        picked=tuple((j.operator, j.estimator) for j in judged),
        filled=filled,
        notes=notes,
    )


def _source(profile: Profile, target: Target, report: FitReport) -> str:
    told = f"profile {profile.metadata.name}, {report.estimator}, for {target.model.name} tp={target.parallel.tp}"
    if report.notes:
        told += f"; {'; '.join(report.notes)}"
    return f"{told}; from the roofline: {'; '.join(report.filled)}" if report.filled else told


def profile_tables(
    place: str,
    model: ModelSpec,
    gpu: GpuSpec,
    node: NodeSpec,
    parallel: Parallelism,
    limits: EngineLimits,
    max_model_len: int,
    *,
    cache: Path | str | None = "user",
) -> tuple[CostTables, FitReport]:
    """``fit_profile`` of "FILE.parquet", "FILE.parquet#ESTIMATOR", "FILE.parquet#@BACKEND" or with both.

    The result is kept in the user's cache folder by the content of the file, the arguments and the versions.

    Args:
        place: The file, and perhaps an estimator and a backend.
        model: What is served.
        gpu: On what.
        node: What joins the GPUs.
        parallel: How the model is cut.
        limits: Largest step and batch, dtypes of weights and cache.
        max_model_len: Tokens of the longest request.
        cache: Folder for tables that were built; "user": platformdirs' one; None: none.

    Raises:
        ProfileError: There is no such file, or it may not speak of this deployment.
        UnknownNameError: There is no such estimator.
    """
    path, estimator, backend = split_place(place)
    if not path.is_file():
        raise ProfileError(f"there is no file {path}")
    asked = (model, gpu, node, parallel, limits, max_model_len)
    if cache is None:
        return fit_profile(read_profile(path), *asked, estimator=estimator, backend=backend)
    sizes = (limits.max_num_batched_tokens, limits.max_num_seqs, max_model_len)
    dtypes = (limits.weight_dtype, limits.kv_dtype)
    arguments = (estimator, backend.lower(), model, gpu, node, parallel.tp, parallel.pp, *sizes, *dtypes)
    stored = cache_path(cache, [path], arguments, "profile")
    found = read_cache(stored)
    if found is None:
        found = fit_profile(read_profile(path), *asked, estimator=estimator, backend=backend)
        write_cache(stored, *found)
    return found


def split_place(place: str) -> tuple[Path, str, str]:
    """(file, estimator, backend) of "FILE", "FILE#ESTIMATOR", "FILE#@BACKEND" or "FILE#ESTIMATOR@BACKEND".

    Where none is given, the estimator is "auto" and the backend "".
    """
    file, mark, asked = place.rpartition("#")
    if not mark:
        return Path(place), "auto", ""
    estimator, _, backend = asked.partition("@")
    if (estimator or "auto") not in ESTIMATORS:
        raise UnknownNameError("estimator", estimator, ESTIMATORS)
    return Path(file), estimator or "auto", backend
