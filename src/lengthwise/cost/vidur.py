"""Cost tables from Vidur's profiles, by its own estimator or by a monotone interpolation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from lengthwise.catalog import stage_layers
from lengthwise.cost import regression
from lengthwise.cost import regression as _monotone
from lengthwise.cost.tables import FitReport, OperatorFit, cache_path, check, read_cache, write_cache
from lengthwise.cost.vidur_format import (
    ALL_REDUCE,
    ALL_REDUCE_LAUNCH_MS,
    CACHE_SAVE,
    CONTEXT_STEP_TOKENS,
    DECODE,
    HIGHEST_BATCH,
    ONCE_A_LAYER,
    PREFILL,
    SECOND_NORM,
    SEND_RECV,
    VIDUR_TOKENS,
    ProfileFiles,
    compose,
    equal_stages,
    find_files,
)
from lengthwise.schema.cost_tables import NOT_MEASURED, CostTables, Floats, Ints, grid_axis
from lengthwise.schema.deployment import EngineLimits, Parallelism
from lengthwise.schema.errors import ProfileError, UnknownNameError
from lengthwise.schema.specs import ModelSpec, NodeSpec

ESTIMATORS = ("monotone", "random_forest")


def vidur_profile(
    folder: Path | str,
    model: ModelSpec,
    gpu_name: str,
    parallel: Parallelism,
    limits: EngineLimits,
    max_model_len: int = VIDUR_TOKENS,
    *,
    node: NodeSpec | None = None,
    estimator: str = "monotone",
    cache: Path | str | None = "user",
) -> tuple[CostTables, FitReport]:
    """Cost tables from a folder laid out like Vidur's ``data/profiling``, and how good the fit is.

    "monotone" (rule PER_REQUEST): medians of repeated rows, isotonic regression over tokens, a surface
    that never falls over (chunk, context) and (sequences, context). "random_forest" (rule MERGED):
    Vidur's forests at one grid point with fixed draws, composed by its rule; above 4,096 tokens they
    stay flat. Neither counts embedding, head or host, which Vidur does not profile.

    Tables are kept in the user's cache folder by the content of the files, the arguments and the
    versions; a second call reads them in well under 0.2 s.

    Args:
        folder: Holds compute/ and network/.
        model: Its name or an alias must be a folder; its shapes pick the rows.
        gpu_name: Starts with the name of a device folder ("A100-80GB": a100).
        parallel: TP picks rows; PP needs send_recv.csv.
        limits: Block size picks rows; largest step and batch size the tables.
        max_model_len: Tokens of the longest request.
        node: Picks the network folder; None takes the device's pairwise NVLink, else its DGX.
        estimator: "monotone" or "random_forest".
        cache: Folder for tables that were built; "user": platformdirs' one; None: none.

    Raises:
        ProfileError: A file, an operator, a model, a TP degree is missing; says what is there.
        MissingExtraError: The forest needs scikit-learn.
        UnknownNameError: There is no such estimator.
    """
    if estimator not in ESTIMATORS:
        raise UnknownNameError("estimator", estimator, ESTIMATORS)
    files = find_files(Path(folder), model, gpu_name, parallel, node)
    sizes = _sizes(limits, max_model_len, estimator)
    if cache is None:
        return _build(files, model, parallel, limits, max_model_len, estimator)
    stored = cache_path(cache, files.paths(), (estimator, model, parallel.tp, parallel.pp, *sizes))
    found = read_cache(stored)
    if found is None:
        found = _build(files, model, parallel, limits, max_model_len, estimator)
        write_cache(stored, *found)
    return found


def _sizes(limits: EngineLimits, max_model_len: int, estimator: str) -> tuple[int, ...]:
    """What of the limits shapes the tables; a forest's have at least Vidur's own sizes."""
    step, length, seqs = limits.max_num_batched_tokens, max_model_len, limits.max_num_seqs
    if estimator == "random_forest":
        step, length, seqs = max(VIDUR_TOKENS, step), max(VIDUR_TOKENS, length), max(HIGHEST_BATCH, seqs)
    return step, length, seqs, limits.block_size


def _build(
    files: ProfileFiles,
    model: ModelSpec,
    parallel: Parallelism,
    limits: EngineLimits,
    max_model_len: int,
    estimator: str,
) -> tuple[CostTables, FitReport]:
    # What follows imports polars, scipy and scikit-learn, which a run with stored tables does not need.

    samples = read_samples(files, model, parallel, limits.block_size)
    build = monotone_tables if estimator == "monotone" else forest_tables
    source = f"Vidur profile {files.mlp.parent.name}, {estimator}"
    if rows := made_up(files, model, parallel.tp):
        source += f"; {rows:,} attention rows at TP {parallel.tp}: {NOT_MEASURED}"
    tables, report = build(samples, Job(model, parallel.pp, limits, max_model_len, source))
    check(tables, source)
    return tables, report


TP = "num_tensor_parallel_workers"
SURROGATE = "SURROGATE"
"""How a row's ``profile_method`` says that somebody made it up."""


@dataclass(frozen=True)
class Samples:
    """Measured milliseconds of one operator: ``x`` [n] tokens, or [n, 2] for attention.

    Attention's columns are (sequences or chunk, context a sequence).
    """

    x: Floats
    ms: Floats


def read_samples(files: ProfileFiles, model: ModelSpec, parallel: Parallelism, block_size: int) -> dict[str, Samples]:
    """Samples by operator, filtered as Vidur does: by the model's shapes, the TP degree, the links.

    Vocabulary is no filter: no per-layer operator depends on it.

    Raises:
        ProfileError: No row is left, or an operator has none; says what is there.
    """
    samples = _mlp_samples(files.mlp, model, parallel.tp)
    samples |= _attention_samples(files.attention, model, parallel.tp, block_size)
    if files.all_reduce:
        samples[ALL_REDUCE] = _all_reduce_samples(files.all_reduce, model, parallel.tp)
    if files.send_recv:
        samples[SEND_RECV] = _send_recv_samples(files.send_recv, model, parallel)
    return samples


def _mlp_samples(path: Path, model: ModelSpec, tp: int) -> dict[str, Samples]:
    rows = _filtered(read_rows([path]), mlp_shapes(model), tp, path)
    names = [*ONCE_A_LAYER] + [SECOND_NORM] * (f"time_stats.{SECOND_NORM}.median" in rows.columns)
    return {name: _samples(rows, name, ("num_tokens",), path) for name in names}


def is_surrogate(rows: pl.DataFrame) -> pl.Expr:
    """Which rows were made up and not measured."""
    if "profile_method" not in rows.columns:
        return pl.lit(value=False)
    return (pl.col("profile_method") == SURROGATE).fill_null(value=False)


def made_up(files: ProfileFiles, model: ModelSpec, tp: int) -> int:
    """How many attention rows of this shard nobody measured."""
    rows = _filtered(read_rows(files.attention), attention_shapes(model), tp, files.attention[0])
    return len(rows.filter(is_surrogate(rows)))


def _attention_samples(paths: tuple[Path, ...], model: ModelSpec, tp: int, block_size: int) -> dict[str, Samples]:
    shapes = attention_shapes(model) | {"block_size": block_size}
    rows = _filtered(read_rows(paths), shapes, tp, paths[0])
    prefill = rows.filter(pl.col("is_prefill"))
    decode = rows.filter(~pl.col("is_prefill"))
    samples = {
        PREFILL: _samples(prefill, PREFILL, ("prefill_chunk_size", "kv_cache_size"), paths[0]),
        DECODE: _samples(decode, DECODE, ("batch_size", "kv_cache_size"), paths[0]),
    }
    if f"time_stats.{CACHE_SAVE}.median" in rows.columns:
        tokens = pl.max_horizontal("prefill_chunk_size", "batch_size").alias("num_tokens")
        samples[CACHE_SAVE] = _samples(rows.with_columns(tokens), CACHE_SAVE, ("num_tokens",), paths[0])
    return samples


def _all_reduce_samples(path: Path, model: ModelSpec, tp: int) -> Samples:
    rows = read_rows([path])
    same = (pl.col("num_workers") == tp) & (pl.col("devices_per_node") == tp)
    left = rows.filter(same)
    if left.is_empty():
        there = sorted(rows.filter(pl.col("num_workers") == pl.col("devices_per_node"))["num_workers"].unique())
        raise ProfileError(f"{path} must hold all_reduce rows of {tp} GPUs in a node; it holds {there}")
    return _samples(_with_tokens(left, model), ALL_REDUCE, ("num_tokens",), path)


def _send_recv_samples(path: Path, model: ModelSpec, parallel: Parallelism) -> Samples:
    rows = read_rows([path])
    inside = parallel.tp * parallel.pp <= int(rows["max_devices_per_node"].max() or 0)  # type: ignore[arg-type]
    left = rows.filter(pl.col("devices_per_node") == (2 if inside else 1))
    if left.is_empty():
        where = "inside a node (devices_per_node 2)" if inside else "between nodes (devices_per_node 1)"
        raise ProfileError(f"{path} must hold send_recv rows {where}; it holds none")
    return _samples(_with_tokens(left, model), SEND_RECV, ("num_tokens",), path)


def _with_tokens(rows: pl.DataFrame, model: ModelSpec) -> pl.DataFrame:
    return rows.with_columns(num_tokens=pl.col("size") / model.hidden / 2)


def mlp_shapes(model: ModelSpec) -> dict[str, Any]:
    """The columns of mlp.csv that must be the model's own."""
    return {
        "n_embd": model.hidden,
        "n_kv_head": model.attention.kv_heads,
        "n_head": model.attention.heads,
        "n_expanded_embd": model.ffn.intermediate,
        "use_gated_mlp": model.ffn.gated,
    }


def attention_shapes(model: ModelSpec) -> dict[str, Any]:
    """The columns of attention.csv that must be the model's own."""
    return {"n_embd": model.hidden, "n_kv_head": model.attention.kv_heads, "n_q_head": model.attention.heads}


def read_rows(paths: Iterable[Path]) -> pl.DataFrame:
    """The rows of CSV files as one table, each once; raises ProfileError."""
    tables = []
    for path in paths:
        try:
            tables.append(pl.read_csv(path, infer_schema_length=None))
        except (OSError, pl.exceptions.PolarsError) as error:
            raise ProfileError(f"{path} must be a readable CSV file: {error}") from error
    return pl.concat(tables, how="diagonal_relaxed").unique(maintain_order=True)


def _filtered(rows: pl.DataFrame, shapes: dict[str, Any], tp: int, path: Path) -> pl.DataFrame:
    same = of_shapes(rows, shapes, path)
    left = same.filter(pl.col(TP) == tp)
    if left.is_empty():
        degrees = sorted(same[TP].unique().to_list())
        raise ProfileError(f"{path} must hold rows of tp {tp}; it holds tp {degrees}. Use one of these or measure it.")
    return left


def of_shapes(rows: pl.DataFrame, shapes: dict[str, Any], path: Path) -> pl.DataFrame:
    """The rows of a model's shapes, of every TP degree; raises ProfileError where there is none."""
    if TP not in rows.columns:
        raise ProfileError(f"{path} must have the column {TP}; it has {', '.join(rows.columns)}")
    here = {name: value for name, value in shapes.items() if name in rows.columns}
    same = rows.filter(*(pl.col(name) == value for name, value in here.items()))
    if same.is_empty():
        there = rows.select(*here).unique().rows(named=True)
        raise ProfileError(f"{path} must hold rows with {here}; it holds {there}")
    return same


def _samples(rows: pl.DataFrame, name: str, columns: tuple[str, ...], path: Path) -> Samples:
    """Rows of an operator in the order of the file; rows without a time are not measurements of it."""
    median = f"time_stats.{name}.median"
    missing = [column for column in (median, *columns) if column not in rows.columns]
    if missing:
        there = sorted(c.split(".")[1] for c in rows.columns if c.startswith("time_stats.") and c.endswith(".median"))
        raise ProfileError(f"{path} must have {', '.join(missing)}; its operators are {', '.join(there)}")
    kept = rows.select(*columns, median).drop_nulls().cast(dict.fromkeys([*columns, median], pl.Float64))
    if kept.is_empty():
        raise ProfileError(f"{path} must hold times of {name} for this deployment; all of its rows lack them")
    x = kept.select(columns).to_numpy()
    ms = kept[median].to_numpy()
    if not np.isfinite(ms).all() or (ms < 0).any():
        raise ProfileError(f"{path}: times of {name} must be finite and not negative")
    return Samples(x[:, 0] if len(columns) == 1 else x, ms)


FOLDS = 5
LARGEST_KV_TOKENS = 2**24


@dataclass(frozen=True)
class Job:
    """What to build tables for."""

    model: ModelSpec
    pp: int
    limits: EngineLimits
    max_model_len: int
    source: str


def monotone_tables(samples: Mapping[str, Samples], job: Job) -> tuple[CostTables, FitReport]:
    """Tables by the rule PER_REQUEST from curves and surfaces that never fall."""
    limits, max_model_len = job.limits, job.max_model_len
    tokens = np.arange(max(limits.max_num_batched_tokens, limits.max_num_seqs) + 1.0)
    by_tokens = {name: _seconds(_fit(s)(tokens)) for name, s in samples.items() if s.x.ndim == 1}
    nothing = np.zeros(len(tokens))
    layer = sum((by_tokens.get(n, nothing) for n in (*ONCE_A_LAYER, SECOND_NORM, CACHE_SAVE)), nothing)
    comm = 2 * (by_tokens[ALL_REDUCE] + ALL_REDUCE_LAUNCH_MS / 1000) if ALL_REDUCE in by_tokens else nothing
    comm[0] = 0.0
    chunk = grid_axis(max(limits.max_num_batched_tokens, max_model_len)).astype(np.float64)[:, None]
    context = grid_axis(max_model_len).astype(np.float64)
    cached = grid_axis(min(limits.max_num_seqs * max_model_len, LARGEST_KV_TOKENS))
    tables = CostTables(
        layer_s=layer,
        comm_s=comm,
        first_s=nothing,
        send_s=by_tokens.get(SEND_RECV, nothing),
        head_s=np.zeros(limits.max_num_seqs + 1),
        host_s=np.zeros(limits.max_num_seqs + 1),
        prefill_s=_seconds(_fit_surface(samples[PREFILL], PREFILL)(chunk, context)),
        decode_s=_seconds(_decode_ms(samples[DECODE], grid_axis(limits.max_num_seqs), cached)),
        stage_layers=np.array(stage_layers(job.model, job.pp), dtype=np.int64),
        source=job.source,
    )
    fits = tuple(_cross_validated(name, sample) for name, sample in samples.items())
    return tables, FitReport("monotone", f"{FOLDS}-fold", fits)


def _fit(samples: Samples) -> _monotone.Curve:
    return _monotone.fit_curve(samples.x, samples.ms)


def _fit_surface(samples: Samples, name: str) -> _monotone.Surface:
    return _monotone.fit_surface(samples.x, samples.ms, quadratic=name == PREFILL)


def _decode_ms(samples: Samples, seqs: Ints, cached: Ints) -> Floats:
    """[sequences, KV tokens in all]: equal contexts were measured, so the mean one stands for all."""
    mean = cached[None, :] / np.maximum(seqs[:, None], 1)
    return _fit_surface(samples, DECODE)(seqs[:, None].astype(np.float64), mean)


def _cross_validated(name: str, samples: Samples) -> OperatorFit:
    """Every row predicted from the folds that it is not in; rows of one place share a fold."""
    _, place = np.unique(samples.x, axis=0, return_inverse=True)
    fold = np.random.default_rng(0).permutation(place.max() + 1)[place.ravel()] % FOLDS
    predicted = np.empty(len(samples.ms))
    for one in range(FOLDS):
        seen, unseen = fold != one, fold == one
        if not unseen.any() or not seen.any():
            continue
        train = Samples(samples.x[seen], samples.ms[seen])
        if samples.x.ndim == 1:
            predicted[unseen] = _fit(train)(samples.x[unseen])
        else:
            predicted[unseen] = _fit_surface(train, name)(samples.x[unseen, 0], samples.x[unseen, 1])
    return _errors(name, predicted, samples.ms)


def _errors(name: str, predicted: Floats, measured: Floats) -> OperatorFit:
    timed = measured > 0
    error = np.abs(predicted[timed] / measured[timed] - 1) if timed.any() else np.zeros(1)
    return OperatorFit(name, len(measured), float(np.median(error)), float(np.quantile(error, 0.95)))


def forest_tables(samples: Mapping[str, Samples], job: Job) -> tuple[CostTables, FitReport]:
    """Tables by the rule MERGED from Vidur's forests.

    Raises:
        MissingExtraError: scikit-learn is not installed.
        ProfileError: ``pp`` does not divide the layers.
    """
    stages = equal_stages(job.model, job.pp)
    largest = max(VIDUR_TOKENS, job.limits.max_num_batched_tokens)
    tokens = np.arange(1.0, largest + 1)
    contexts = np.arange(0.0, max(VIDUR_TOKENS, job.max_model_len) + CONTEXT_STEP_TOKENS, CONTEXT_STEP_TOKENS)
    batches = np.arange(1.0, max(HIGHEST_BATCH, job.limits.max_num_seqs) + 1)
    axes = {PREFILL: (contexts, tokens**2), DECODE: (batches, contexts)}
    ops, fits = {}, []
    for name, sample in samples.items():
        x = np.stack([sample.x[:, 1], sample.x[:, 0] ** 2], axis=1) if name == PREFILL else sample.x
        forest = regression.fit_forest(x, sample.ms)
        fits.append(_errors(name, forest.oob_prediction_, sample.ms))
        ops[name] = _with_zero(regression.predict(forest, *axes.get(name, (tokens,))), axis=int(name == PREFILL))
    return compose(ops, job.model, stages, job.source), FitReport("random_forest", "out of bag", tuple(fits))


def _with_zero(values: Floats, axis: int) -> Floats:
    """The values with a 0 for no tokens before them."""
    width = [(1, 0) if a == axis else (0, 0) for a in range(values.ndim)]
    return np.pad(values, width)


def _seconds(milliseconds: Floats) -> Floats:
    seconds = np.asarray(milliseconds / 1000.0, dtype=np.float64)
    seconds[0] = 0.0
    return seconds
