"""Fits cost tables to the rows of a profile that apply to a deployment, and reports their errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise import catalog
from lengthwise.cost.estimators.assembly import Assembly, fit_mixed_batches, mixed_batch_factors, unequal_lengths_error
from lengthwise.cost.estimators.cross_validation import SELECTIONS, ValidatedFit, fit_validated
from lengthwise.cost.estimators.fitters import FITTERS, split_single_token, with_single_token
from lengthwise.cost.estimators.points import Target, kernel_points, rows_points
from lengthwise.cost.operator_work import kernels_of, layer_share
from lengthwise.cost.profiles import read_profile
from lengthwise.cost.provenance import speed_class
from lengthwise.cost.roofline_tables import HostOverhead
from lengthwise.cost.tables import FitReport, cache_path, cached, check
from lengthwise.schema.cost_tables import NOT_MEASURED, CostTables, FitError, Floats, Reach
from lengthwise.schema.deployment import EngineLimits, Parallelism
from lengthwise.schema.errors import InputError, ProfileError, UnknownNameError
from lengthwise.schema.profile import OPERATOR_PARTS, Profile
from lengthwise.schema.specs import GpuSpec, ModelFacts, ModelSpec, NodeSpec


@dataclass(frozen=True)
class Source:
    """The rows of a profile that apply to a deployment, and the model and GPU on which they were measured."""

    shard: Profile  # rows of the model's shards
    kernels: Profile  # rows of model-independent kernels
    target: Target  # with the measured model and GPU
    is_same_model_and_gpu: bool  # as the deployment's
    is_same_gpu: bool
    notes: tuple[str, ...]


def rows_for(profile: Profile, target: Target, backend: str = "") -> Source:
    """Return the rows of a profile that apply to a deployment: of its dtypes, and one backend for each operator.

    Preferred is the backend whose name contains ``backend``, then one with CUDA graphs, then the one with most rows.
    Raises ProfileError if no row applies.
    """
    notes: list[str] = []
    rows = _rows_of_dtype(profile, target, notes)
    rows = _rows_of_backend(rows, backend, notes)
    _require_attention_backend(rows, backend, target.model, notes)
    gpu = _measured_gpu(profile, target)
    shard, kernels = rows.where(rows["tp"] > 0), rows.where(rows["tp"] == 0)
    if "fused moe" in shard.operators:
        raise ProfileError(
            f"rows of fused moe must have tp 0, as those of kernels; in the profile {profile.metadata.name} they have "
            "the tp of a shard, and count only the activated experts. Import the profile again"
        )
    model = _measured_model(profile, target) if len(shard) else target.model
    is_same_gpu = gpu.name == target.gpu.name
    if not is_same_gpu:
        notes.append(f"measured on {gpu.name}, carried to {target.gpu.name} by their data sheets")
    if len(shard) and model.name != target.model.name:
        notes.append(f"measured for {model.name}, carried to {target.model.name} by the sizes of its operators")
    measured = Target(model, gpu, target.node, target.parallel, target.limits, target.max_model_len)
    is_same = is_same_gpu and model.name == target.model.name
    return Source(shard, kernels, measured, is_same, is_same_gpu, tuple(notes))


def _rows_of_dtype(profile: Profile, target: Target, notes: list[str]) -> Profile:
    layers, cache = (speed_class(dtype) if dtype else "" for dtype in (target.weight_dtype, target.limits.kv_dtype))
    names, kv_names = (_speed_classes(profile[column]) for column in ("dtype", "kv_dtype"))
    wide, wide_kv = names == "bfloat16", kv_names == "bfloat16"
    part = np.array([OPERATOR_PARTS[str(name)] for name in profile["operator"]])
    matrices = np.isin(part, ("layer", "gemm"))
    fits = (names == "") | (names == layers) | (~matrices & wide) | ((part == "gemm") & wide)
    attention = np.isin(part, ("prefill", "decode", "mixed"))
    fits &= ~attention | (kv_names == "") | (kv_names == (cache or layers)) | (not cache) & wide_kv
    if not (fits & matrices).any() and matrices.any():
        measured = f"{profile.metadata.name} was measured with {', '.join(sorted(set(names[matrices].tolist())))}"
        need = f"{target.model.name} has {layers} weights"
        raise ProfileError(f"{need}, and the profile {measured}; use a profile of {layers}")
    rows = profile.where(fits)
    if len(rows) < len(profile):
        notes.append(f"{len(profile) - len(rows):,} rows of other dtypes left out")
    return rows


def _speed_classes(column: npt.NDArray[np.str_]) -> npt.NDArray[np.str_]:
    known, index = np.unique(column, return_inverse=True)
    names = []
    for name in known.tolist():
        try:
            names.append(speed_class(name))
        except InputError:
            names.append(name)
    return np.array(names, dtype=np.str_)[index] if names else column


def _rows_of_backend(rows: Profile, requested: str, notes: list[str]) -> Profile:
    """Return one backend's rows per operator. Prefer the requested one, then CUDA graphs, then the most rows.

    A matrix product has one for quantized weights and one for 16-bit weights, since other libraries compute these.
    """
    mask, found, wide = np.ones(len(rows), dtype=bool), False, _speed_classes(rows["dtype"]) == "bfloat16"
    products = np.array([OPERATOR_PARTS[str(name)] == "gemm" for name in rows["operator"]], dtype=bool)
    for operator, is_wide in [(name, is_wide) for name in rows.operators for is_wide in (False, True)]:
        own = (rows["operator"] == operator) & ((wide & products) == is_wide)
        names, counts = np.unique(rows["backend"][own], return_counts=True)
        matching = np.array([_matches(name, requested) for name in names.tolist()])
        found = found or bool(matching.any())
        if len(names) > 1:
            # Engines run steps of decodes as CUDA graphs.
            graphs = np.array(["graph" in str(name) for name in names])
            best = str(names[np.lexsort((counts, graphs, matching))[-1]])
            mask &= ~own | (rows["backend"] == best)
            others = ", ".join(name or "an unnamed backend" for name in names.tolist() if name != best)
            reason = "as requested" if matching.any() else "the most rows, or graphs"
            taken = f"rows of {best or 'an unnamed backend'} taken ({reason})"
            notes.append(f"{operator}: {taken}, those of {others} left out; #@NAME chooses")
    if requested and not found:
        known = ", ".join(sorted(set(rows["backend"].tolist()) - {""})) or "none with a name"
        lacking = f"has no rows of the backend {requested}; its backends are: {known}"
        raise ProfileError(f"the profile {rows.metadata.name} {lacking}")
    return rows.where(mask)


def _matches(name: str, requested: str) -> bool:
    return bool(requested) and requested.lower() in name.lower()


def _require_attention_backend(rows: Profile, requested: str, model: ModelSpec, notes: list[str]) -> None:
    backends: dict[str, list[str]] = {}
    for operator in rows.operators:
        names = sorted(set(rows.of(operator)["backend"].tolist()) - {""})
        if names and OPERATOR_PARTS[operator] in ("prefill", "decode") and layer_share(model, operator) > 0:
            backends[operator] = names
    others = {op: names for op, names in backends.items() if not any(_matches(name, requested) for name in names)}
    if not others:
        return
    listed = "; ".join(f"{operator} with {', '.join(names)}" for operator, names in others.items())
    if len(others) < len(backends):
        found = f"it has {listed} alone. Use a profile of {requested}, or name no backend"
        raise ProfileError(f"the profile {rows.metadata.name} must be of the attention backend {requested}; {found}")
    contrast = f", not with {requested}" if requested else ": right if the deployment's is the same"
    notes.append(f"measured {listed}{contrast}")


def _measured_gpu(profile: Profile, target: Target) -> GpuSpec:
    def plain(name: str) -> str:
        return "".join(letter for letter in name.lower() if letter.isalnum())

    named = profile.metadata.gpu
    if not named or plain(named) in {plain(name) for name in (target.gpu.name, *target.gpu.aliases)}:
        return target.gpu
    try:
        return catalog.gpu(named)
    except InputError as error:
        raise ProfileError(
            f"the profile {profile.metadata.name} is of {named}, which is not {target.gpu.name} and in no catalog; "
            f"use a profile of this GPU; if it is the same device, say so in its TOML file (of --gpu): aliases = "
            f'["{named}"], or ["{named}"] as its heading'
        ) from error


def _measured_model(profile: Profile, target: Target) -> ModelSpec:
    named = profile.metadata.model
    if not named or named == target.model.name or named in target.model.metadata.aliases:
        return target.model
    try:
        model = catalog.model(named)
    except InputError as error:
        raise ProfileError(
            f"the profile {profile.metadata.name} is of the model {named}, which is not {target.model.name} and in "
            "no catalog; use a profile of this model, or of model-independent kernels"
        ) from error
    own, other = (replace(one, name="", max_model_len=0, metadata=ModelFacts()) for one in (model, target.model))
    return target.model if own == other else model  # fine-tuned and quantized variants of a model share its shapes


def reach_of(source: Source, target: Target) -> Reach:
    """Return the largest sizes of a step at which every operator was measured. A size is None if it was not measured.

    The shard's rows at the deployment's TP degree count. Without such rows, its rows at all degrees count, and without
    these the rows of kernels. ``context`` is the longest prompt, or the longest mean context of a decode batch.
    """
    shard = source.shard
    own = shard.where(shard["tp"] == target.parallel.tp)
    rows = own if len(own) else shard

    def maximum(profile: Profile, part: str, value: Callable[[Profile], npt.NDArray[Any]]) -> int | None:
        operators = [profile.of(operator) for operator in profile.operators if OPERATOR_PARTS[operator] == part]
        return min((int(value(own).max()) for own in operators), default=None)

    def largest(part: str, value: Callable[[Profile], npt.NDArray[Any]]) -> int | None:
        found = maximum(rows, part, value)
        return maximum(source.kernels, part, value) if found is None else found

    tokens = maximum(rows, "layer", lambda p: p["tokens"])
    lengths = (
        largest("prefill", lambda p: np.asarray(p["chunk"] + p["context"])),
        largest("decode", lambda p: np.asarray(p["kv_tokens"] // np.maximum(p["seqs"], 1))),
    )
    return Reach(
        tokens=maximum(source.kernels, "gemm", lambda p: p["tokens"]) if tokens is None else tokens,
        seqs=largest("decode", lambda p: p["seqs"]),
        chunk=largest("prefill", lambda p: p["chunk"]),
        context=max((length for length in lengths if length is not None), default=None),
        kv_tokens=largest("decode", lambda p: p["kv_tokens"]),
        prefix=largest("prefill", lambda p: p["context"]),
    )


METHOD = (
    "points inside the measured range of every axis are held out, and each half of them is predicted by the estimator "
    "that is best on the other half; the largest third of the points is also predicted from the rest"
)
ESTIMATORS = (*SELECTIONS, *FITTERS)


def fit_profile(
    profile: Profile, target: Target, *, estimator: str = "auto", backend: str = "", host: HostOverhead = HostOverhead()
) -> tuple[CostTables, FitReport]:
    """Fit cost tables (rule PER_REQUEST) to measured operators, and report the errors of the fit.

    Operators of the model's shard are fitted to their own rows, and model-independent kernels as functions of their
    sizes. For another TP degree, model or GPU than the measured one, only "physics" can predict, with a larger error
    (TRANSFER_FACTORS). The roofline supplies what the profile lacks. ``source`` and the report list those operators.

    The error of a part is ``sum_o w_o sd_o``: ``w_o`` is the share of operator o in the part's time, ``sd_o`` the root
    mean square of log(measured / predicted) over its held-out points, or the roofline's error. An operator with too few
    points takes the largest error in the part, including the roofline's. It gets no FitError, nor do transferred rows.

    Args:
        estimator: "auto" (for each operator the best on held-out points), or one of ESTIMATORS for all operators.
        backend: Part of the name of the backend to use. "" prefers one with CUDA graphs, then the one with most rows.
        host: Host overhead, used if the profile has none, and front end, which no profile measures.

    Raises:
        InputError: There is no such estimator.
        MissingExtraError: The estimator is a forest, and scikit-learn is not installed.
        ProfileError: No row of the profile applies to the deployment.
    """
    if estimator not in ESTIMATORS:
        raise UnknownNameError("estimator", estimator, ESTIMATORS)
    source = rows_for(profile, target, backend)
    reach, notes = reach_of(source, target), list(source.notes)
    shard = _fit_shard(source, target, reach, estimator, notes)
    kernels = _fit_kernels(source, target, estimator)
    if not shard and not kernels:
        found = ", ".join(profile.operators) or "no rows"
        raise ProfileError(
            f"the profile {profile.metadata.name} has no operator of {target.model.name}; it has {found}"
        )
    assembly = Assembly(target, shard, kernels, host)
    tables = replace(assembly.tables(), beside_prompts=_mixed_batches(source, target, shard, notes))

    fits = [*shard.values(), *(fit for name, fit in kernels.items() if name != "gemm wide")]
    if unknown := [fit.operator for fit in fits if fit.log_sd is None and not fit.is_made_up]:
        notes.append(f"too few points to estimate an error of {', '.join(unknown)}: the roofline's counts")
    if transferred := [fit.operator for fit in fits if fit.is_transferred]:
        notes.append(f"no errors are reported for {', '.join(transferred)}: the points belong to another deployment")
    report = FitReport(
        estimator,
        METHOD,
        tuple(summary for fit in fits if (summary := fit.summary()) is not None),
        compared=tuple(region for fit in fits for region in fit.compared),
        picked=tuple((fit.operator, fit.estimator) for fit in fits),
        filled=assembly.filled(),
        notes=tuple(notes),
    )
    origin = f"profile {profile.metadata.name}, {estimator}, for {target.model.name} tp={target.parallel.tp}"
    origin += f"; {'; '.join(notes)}" if notes else ""
    origin += f"; from the roofline: {'; '.join(report.filled)}" if report.filled else ""
    errors = tuple(FitError(fit.name, fit.median_error, fit.p95_error) for fit in report.operators)
    tables = replace(tables, evidence=replace(tables.evidence, source=origin, fit=errors, reach=reach))
    check(tables, origin)
    return tables, report


def _fit_shard(
    source: Source, target: Target, reach: Reach, estimator: str, notes: list[str]
) -> dict[str, ValidatedFit]:
    fits: dict[str, ValidatedFit] = {}
    bridged, made_up = set(), dict[tuple[int, ...], list[str]]()
    for operator in source.shard.operators:
        part = OPERATOR_PARTS[operator]
        if part in ("mixed", "gemm", "comm", "send"):
            continue
        rows = source.shard.of(operator)
        exact = source.is_same_model_and_gpu and target.parallel.tp in rows.tensor_parallel
        own = rows.where(rows["tp"] == target.parallel.tp) if exact else rows
        points = rows_points(operator, own, source.target)
        if points is None:
            continue
        if not exact and source.is_same_model_and_gpu:
            bridged.add(rows.tensor_parallel)
        transfers = [] if target.parallel.tp in rows.tensor_parallel else ["tp"]
        transfers += [] if source.target.model.name == target.model.name else ["model"]
        transfers += [] if source.is_same_gpu else ["gpu"]
        out_of_range = _exceeds(part, reach, target)
        split = None if transfers else split_single_token(points)
        fitted = points if split is None else split[1]
        fit = fit_validated(fitted, estimator, out_of_range=out_of_range, transfers=transfers)
        if split is not None:
            fit = replace(fit, predict=with_single_token(*split, fit.predict), rows=len(points))
        if degrees := own.made_up(operator):
            made_up.setdefault(degrees, []).append(operator)
            fit = replace(fit, log_sd=None, compared=(), error=None, is_made_up=True)  # these rows are not measurements
        fits[operator] = fit
    for degrees, operators in made_up.items():
        place = f"{', '.join(operators)} at TP {', '.join(map(str, degrees))}"
        notes.append(f"{place}: {NOT_MEASURED}; their errors are unknown")
    carried = f"carried to TP {target.parallel.tp} by physics"
    notes += [f"measured at TP {', '.join(map(str, degrees))}, {carried}" for degrees in sorted(bridged)]
    return fits


def _exceeds(part: str, reach: Reach, target: Target) -> bool:
    limits = target.limits
    tokens = max(limits.max_num_batched_tokens, limits.max_num_seqs)
    chunk = min(limits.max_num_batched_tokens, target.max_model_len)
    pairs: dict[str, tuple[tuple[int | None, int], ...]] = {"layer": ((reach.tokens, tokens),)}
    pairs["embedding"] = pairs["layer"]
    pairs["prefill"] = ((reach.chunk, chunk), (reach.prefix, target.max_model_len))
    pairs["decode"] = ((reach.seqs, limits.max_num_seqs),)
    return any(measured is not None and measured < largest for measured, largest in pairs.get(part, ()))


def _mixed_batches(
    source: Source, target: Target, shard: Mapping[str, ValidatedFit], notes: list[str]
) -> Floats | None:
    tp = target.parallel.tp
    prompts, decodes = shard.get("prefill attention"), shard.get("decode attention")
    if not source.is_same_model_and_gpu or prompts is None or decodes is None:
        return None
    unequal = unequal_lengths_error(source.shard.of("decode attention", tp), decodes, target)
    if unequal is not None:
        points, more = unequal
        notes.append(f"decodes of unequal lengths take {more:+.1%} at the median of {points:,} points; not counted")
    mixed = fit_mixed_batches(source.shard.of("mixed attention", tp), prompts, decodes, target)
    if mixed is None:
        return None
    note = f"prompts and decodes in one step: their sum is off by {mixed.sum_error:.1%} at the median"
    if mixed.mixed_error >= mixed.sum_error:
        notes.append(note)
        return None
    notes.append(f"{note}, with separate decodes next to prompts {mixed.mixed_error:.1%}")
    return mixed_batch_factors(mixed, decodes, target)


def _fit_kernels(source: Source, target: Target, estimator: str) -> dict[str, ValidatedFit]:
    kinds: dict[str, Profile] = {}
    # Collectives do not depend on the model, even if they were measured with a model's shard.
    if source.is_same_gpu and (source.shard["operator"] == "all-reduce").any():
        kinds["all-reduce"] = source.shard.of("all-reduce")
    for operator in source.kernels.operators:
        rows = source.kernels.of(operator)
        if operator == "gemm":
            wide = np.isin(rows["dtype"], ("", "bfloat16", "bf16", "float16", "fp16", "half"))
            is_narrow = target.weight_dtype not in ("bfloat16", "float16")
            kinds |= {"gemm": rows.where(~wide if is_narrow else wide), "gemm wide": rows.where(wide)}
        elif operator == "fused moe":
            kinds |= {operator: rows} if target.model.ffn.experts else {}
        elif operator == "all-reduce":
            kinds |= {operator: rows} if target.parallel.tp > 1 else {}
        elif "attention" not in operator or (
            not target.model.attention.is_mla and layer_share(target.model, operator) > 0
        ):
            kinds[operator] = rows
    fits = {}
    for name, rows in kinds.items():
        kernels = kernels_of(source.target.gpu, "bfloat16" if name == "gemm wide" else target.weight_dtype)
        operator = "gemm" if name == "gemm wide" else name
        points = kernel_points(operator, rows.columns, kernels, target.node) if len(rows) else None
        if points is not None:
            method = "tables" if estimator == "monotone" else estimator  # monotone fits one shape only
            transfers = () if source.is_same_gpu else ("gpu",)
            fits[name] = fit_validated(points, method, out_of_range=False, transfers=transfers)
    return fits


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
    """Return cost tables fitted to the profile at ``place``, and the report of the fit.

    Args:
        place: "FILE.parquet", "FILE.parquet#ESTIMATOR" or "FILE.parquet#ESTIMATOR@BACKEND".
        cache: Folder in which fitted tables are cached. "user" is the user's cache folder; None disables the cache.
    """
    file, mark, choice = place.rpartition("#")
    name, _, backend = choice.partition("@") if mark else ("", "", "")
    path, estimator = Path(file if mark else place), name or "auto"
    if estimator not in ESTIMATORS:
        raise UnknownNameError("estimator", estimator, ESTIMATORS)
    if not path.is_file():
        raise ProfileError(f"there is no file {path}")
    stored = None
    if cache is not None:
        sizes = (limits.max_num_batched_tokens, limits.max_num_seqs, max_model_len)
        dtypes = (limits.weight_dtype, limits.kv_dtype)
        arguments = (estimator, backend.lower(), model, gpu, node, parallel.tp, parallel.pp, *sizes, *dtypes)
        stored = cache_path(cache, [path], arguments, "profile")
    target = Target(model, gpu, node, parallel, limits, max_model_len)
    return cached(stored, lambda: fit_profile(read_profile(path), target, estimator=estimator, backend=backend))
