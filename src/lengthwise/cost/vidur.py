"""Builds cost tables from Vidur's profiles, with Vidur's own estimator or by monotone interpolation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from lengthwise.catalog import stage_layers
from lengthwise.cost import regression
from lengthwise.cost import vidur_format as layout
from lengthwise.cost.roofline_tables import LARGEST_KV_TOKENS
from lengthwise.cost.tables import FitReport, OperatorFit, cache_path, cached, check
from lengthwise.cost.vidur_format import ALL_REDUCE, CACHE_SAVE, DECODE, ONCE_A_LAYER, PREFILL, SECOND_NORM, SEND_RECV
from lengthwise.schema.cost_tables import NOT_MEASURED, CostEvidence, CostTables, Floats, grid_axis
from lengthwise.schema.deployment import EngineLimits, Parallelism
from lengthwise.schema.errors import ProfileError, UnknownNameError
from lengthwise.schema.specs import ModelSpec, NodeSpec

ESTIMATORS = ("monotone", "random_forest", "random_forest_grid")


def vidur_profile(
    folder: Path | str,
    model: ModelSpec,
    gpu_name: str,
    parallel: Parallelism,
    limits: EngineLimits,
    max_model_len: int = layout.VIDUR_TOKENS,
    *,
    node: NodeSpec | None = None,
    estimator: str = "monotone",
    cache: Path | str | None = "user",
) -> tuple[CostTables, FitReport]:
    """Build cost tables from a folder laid out like Vidur's ``data/profiling``, and report the errors of the fit.

    "monotone" (rule PER_REQUEST): medians of repeated rows, isotonic regression over tokens, non-decreasing surfaces
    over (chunk, context) and (sequences, context). "random_forest" (rule MERGED): Vidur's forests with one choice of
    its parameters and a fixed seed, combined by its rule; beyond the measured sizes they are constant.
    "random_forest_grid" chooses these parameters for each operator by Vidur's grid search, which takes about two hours
    of CPU time. No table has embedding, head or host, which Vidur does not profile. Raises ProfileError if files or
    rows are missing, with a list of those that exist, and UnknownNameError for another estimator.

    Args:
        model: A folder must have its name or an alias. Its shapes select the rows.
        gpu_name: Must start with the name of a device folder ("A100-80GB": a100).
        node: Selects the network folder. None takes the device's pairwise NVLink, or else its DGX.
        cache: Folder for built tables. "user" is the folder that platformdirs gives, None uses no cache.
    """
    if estimator not in ESTIMATORS:
        raise UnknownNameError("estimator", estimator, ESTIMATORS)
    files = layout.find_files(Path(folder), model, gpu_name, parallel, node)
    stored = None
    if cache is not None:
        sizes = limits.max_num_batched_tokens, max_model_len, limits.max_num_seqs
        if estimator != "monotone":  # the forests' tables have at least Vidur's own sizes
            least = layout.VIDUR_TOKENS
            sizes = max(least, sizes[0]), max(least, sizes[1]), max(layout.HIGHEST_BATCH, sizes[2])
        arguments = (estimator, model, parallel.tp, parallel.pp, *sizes, limits.block_size)
        stored = cache_path(cache, files.paths(), arguments)

    def build() -> tuple[CostTables, FitReport]:
        samples, surrogates = read_samples(files, model, parallel, limits.block_size)
        source = f"Vidur profile {files.mlp.parent.name}, {estimator}"
        if surrogates:
            source += f"; {surrogates:,} attention rows at TP {parallel.tp}: {NOT_MEASURED}"
        forests = partial(forest_tables, estimator=estimator)
        make_tables = monotone_tables if estimator == "monotone" else forests
        tables, report = make_tables(samples, model, parallel.pp, limits, max_model_len, source)
        check(tables, source)
        return tables, report

    return cached(stored, build)


TP = "num_tensor_parallel_workers"  # column of the tensor-parallel degree
SURROGATE = "SURROGATE"  # value of ``profile_method`` for rows that are made up and not measured


@dataclass(frozen=True)
class Samples:
    """Measured milliseconds of one operator. ``x`` is [n] tokens, or [n, 2] (sequences or chunk, mean context)."""

    x: Floats
    ms: Floats


def read_samples(
    files: layout.ProfileFiles, model: ModelSpec, parallel: Parallelism, block_size: int
) -> tuple[dict[str, Samples], int]:
    """Return the samples of each operator, and the number of surrogate (made-up) attention rows at the TP degree."""
    # Filtered as in Vidur by shapes, TP degree and links, but not by vocabulary, on which no such operator depends.
    tp, mlp, attention = parallel.tp, files.mlp, files.attention[0]
    rows = _of_degree(read_rows([mlp]), mlp_shapes(model), tp, mlp)
    names = [*ONCE_A_LAYER] + [SECOND_NORM] * (f"time_stats.{SECOND_NORM}.median" in rows.columns)
    samples = {name: _samples(rows, name, ("num_tokens",), mlp) for name in names}

    table = read_rows(files.attention)
    of_any_block = _of_degree(table, attention_shapes(model), tp, attention)
    surrogates = len(of_any_block.filter(is_surrogate(of_any_block)))
    rows = _of_degree(table, attention_shapes(model) | {"block_size": block_size}, tp, attention)
    prefill, decode = rows.filter(pl.col("is_prefill")), rows.filter(~pl.col("is_prefill"))
    samples[PREFILL] = _samples(prefill, PREFILL, ("prefill_chunk_size", "kv_cache_size"), attention)
    samples[DECODE] = _samples(decode, DECODE, ("batch_size", "kv_cache_size"), attention)
    if f"time_stats.{CACHE_SAVE}.median" in rows.columns:
        rows = rows.with_columns(pl.max_horizontal("prefill_chunk_size", "batch_size").alias("num_tokens"))
        samples[CACHE_SAVE] = _samples(rows, CACHE_SAVE, ("num_tokens",), attention)

    tokens = pl.col("size") / model.hidden / 2
    if files.all_reduce:
        table = read_rows([files.all_reduce])
        in_node = table.filter(pl.col("num_workers") == pl.col("devices_per_node"))
        rows = in_node.filter(pl.col("num_workers") == tp)
        if rows.is_empty():
            degrees = sorted(in_node["num_workers"].unique())
            needed = f"all_reduce rows of {tp} GPUs in a node"
            raise ProfileError(f"{files.all_reduce} must hold {needed}; it holds {degrees}")
        rows = rows.with_columns(num_tokens=tokens)
        samples[ALL_REDUCE] = _samples(rows, ALL_REDUCE, ("num_tokens",), files.all_reduce)
    if files.send_recv:
        table = read_rows([files.send_recv])
        inside = tp * parallel.pp <= int(table["max_devices_per_node"].max() or 0)  # type: ignore[arg-type]
        rows = table.filter(pl.col("devices_per_node") == (2 if inside else 1))
        if rows.is_empty():
            where = "inside a node (devices_per_node 2)" if inside else "between nodes (devices_per_node 1)"
            raise ProfileError(f"{files.send_recv} must hold send_recv rows {where}; it holds none")
        rows = rows.with_columns(num_tokens=tokens)
        samples[SEND_RECV] = _samples(rows, SEND_RECV, ("num_tokens",), files.send_recv)
    return samples, surrogates


def is_surrogate(rows: pl.DataFrame) -> pl.Expr:
    """Return an expression that is true for rows whose times were made up instead of measured."""
    if "profile_method" not in rows.columns:
        return pl.lit(value=False)
    return (pl.col("profile_method") == SURROGATE).fill_null(value=False)


def mlp_shapes(model: ModelSpec) -> dict[str, Any]:
    """Return the values that columns of mlp.csv must have for a model."""
    attention, ffn = model.attention, model.ffn
    shapes = {"n_embd": model.hidden, "n_kv_head": attention.kv_heads, "n_head": attention.heads}
    return shapes | {"n_expanded_embd": ffn.intermediate, "use_gated_mlp": ffn.gated}


def attention_shapes(model: ModelSpec) -> dict[str, Any]:
    """Return the values that columns of attention.csv must have for a model."""
    return {"n_embd": model.hidden, "n_kv_head": model.attention.kv_heads, "n_q_head": model.attention.heads}


def read_rows(paths: Iterable[Path]) -> pl.DataFrame:
    """Read the distinct rows of CSV files as one table. Raises ProfileError if a file is unreadable."""
    tables = []
    for path in paths:
        try:
            tables.append(pl.read_csv(path, infer_schema_length=None))
        except (OSError, pl.exceptions.PolarsError) as error:
            raise ProfileError(f"{path} must be a readable CSV file: {error}") from error
    return pl.concat(tables, how="diagonal_relaxed").unique(maintain_order=True)


def _of_degree(rows: pl.DataFrame, shapes: dict[str, Any], tp: int, path: Path) -> pl.DataFrame:
    same = of_shapes(rows, shapes, path)
    own = same.filter(pl.col(TP) == tp)
    if own.is_empty():
        degrees = sorted(same[TP].unique().to_list())
        raise ProfileError(f"{path} must hold rows of tp {tp}; it holds tp {degrees}. Use one of these or measure it.")
    return own


def of_shapes(rows: pl.DataFrame, shapes: dict[str, Any], path: Path) -> pl.DataFrame:
    """Return the rows with a model's shapes at all TP degrees. Raises ProfileError if there are none."""
    if TP not in rows.columns:
        raise ProfileError(f"{path} must have the column {TP}; it has {', '.join(rows.columns)}")
    required = {name: value for name, value in shapes.items() if name in rows.columns}
    same = rows.filter(*(pl.col(name) == value for name, value in required.items()))
    if same.is_empty():
        found = rows.select(*required).unique().rows(named=True)
        raise ProfileError(f"{path} must hold rows with {required}; it holds {found}")
    return same


def _samples(rows: pl.DataFrame, name: str, columns: tuple[str, ...], path: Path) -> Samples:
    median = f"time_stats.{name}.median"
    if missing := [column for column in (median, *columns) if column not in rows.columns]:
        known = sorted(c.split(".")[1] for c in rows.columns if c.startswith("time_stats.") and c.endswith(".median"))
        raise ProfileError(f"{path} must have {', '.join(missing)}; its operators are {', '.join(known)}")
    timed = rows.select(*columns, median).drop_nulls().cast(dict.fromkeys([*columns, median], pl.Float64))
    if timed.is_empty():
        raise ProfileError(f"{path} must hold times of {name} for this deployment; all of its rows lack them")
    x, ms = timed.select(columns).to_numpy(), timed[median].to_numpy()
    if not np.isfinite(ms).all() or (ms < 0).any():
        raise ProfileError(f"{path}: times of {name} must be finite and not negative")
    return Samples(x[:, 0] if len(columns) == 1 else x, ms)


FOLDS = 5


def monotone_tables(
    samples: Mapping[str, Samples], model: ModelSpec, pp: int, limits: EngineLimits, max_model_len: int, source: str
) -> tuple[CostTables, FitReport]:
    """Build tables (rule PER_REQUEST) from non-decreasing curves and surfaces."""
    tokens = np.arange(max(limits.max_num_batched_tokens, limits.max_num_seqs) + 1.0)
    by_one = {name: sample for name, sample in samples.items() if sample.x.ndim == 1}
    by_tokens = {n: layout.seconds(regression.fit_curve(s.x, s.ms)(tokens)) for n, s in by_one.items()}
    zeros = np.zeros(len(tokens))
    layer = sum((by_tokens.get(n, zeros) for n in (*ONCE_A_LAYER, SECOND_NORM, CACHE_SAVE)), zeros)
    comm = 2 * (by_tokens[ALL_REDUCE] + layout.ALL_REDUCE_LAUNCH_MS / 1000) if ALL_REDUCE in by_tokens else zeros
    comm[0] = 0.0
    chunk = grid_axis(max(limits.max_num_batched_tokens, max_model_len)).astype(np.float64)[:, None]
    context = grid_axis(max_model_len).astype(np.float64)
    seqs = grid_axis(limits.max_num_seqs)[:, None]
    cached_tokens = grid_axis(min(limits.max_num_seqs * max_model_len, LARGEST_KV_TOKENS))
    # Vidur measured batches of equal contexts, so the mean context stands for all.
    mean_context = cached_tokens[None, :] / np.maximum(seqs, 1)
    prefill, decode = (
        regression.fit_surface(samples[name].x, samples[name].ms, quadratic=name == PREFILL)
        for name in (PREFILL, DECODE)
    )
    tables = CostTables(
        layer_s=layer,
        comm_s=comm,
        embedding_s=zeros,
        send_s=by_tokens.get(SEND_RECV, zeros),
        head_s=np.zeros(limits.max_num_seqs + 1),
        host_s=np.zeros(limits.max_num_seqs + 1),
        prefill_s=layout.seconds(prefill(chunk, context)),
        decode_s=layout.seconds(decode(seqs.astype(np.float64), mean_context)),
        stage_layers=np.array(stage_layers(model, pp), dtype=np.int64),
        evidence=CostEvidence(source),
    )
    fits = tuple(_cross_validated(name, sample) for name, sample in samples.items())
    return tables, FitReport("monotone", f"{FOLDS}-fold", fits)


def _cross_validated(name: str, samples: Samples) -> OperatorFit:
    _, place = np.unique(samples.x, axis=0, return_inverse=True)
    fold = np.random.default_rng(0).permutation(place.max() + 1)[place.ravel()] % FOLDS
    predicted = np.empty(len(samples.ms))
    for number in range(FOLDS):
        train, test = fold != number, fold == number
        if not test.any() or not train.any():
            continue
        x, ms = samples.x[train], samples.ms[train]
        if samples.x.ndim == 1:
            predicted[test] = regression.fit_curve(x, ms)(samples.x[test])
        else:
            surface = regression.fit_surface(x, ms, quadratic=name == PREFILL)
            predicted[test] = surface(samples.x[test, 0], samples.x[test, 1])
    return _operator_fit(name, predicted, samples.ms)


def _operator_fit(name: str, predicted: Floats, measured: Floats) -> OperatorFit:
    timed = measured > 0
    error = np.abs(predicted[timed] / measured[timed] - 1) if timed.any() else np.zeros(1)
    return OperatorFit(name, len(measured), float(np.median(error)), float(np.quantile(error, 0.95)))


def forest_tables(
    samples: Mapping[str, Samples],
    model: ModelSpec,
    pp: int,
    limits: EngineLimits,
    max_model_len: int,
    source: str,
    *,
    estimator: str = "random_forest",
) -> tuple[CostTables, FitReport]:
    """Fit Vidur's random forests and return their predictions as tables. ``pp`` must divide the number of layers.

    In the tables all prefills of a step are one prefill, as in Vidur (rule MERGED). ``source`` names their source.
    """
    stages = layout.equal_stages(model, pp)
    tokens = np.arange(1.0, max(layout.VIDUR_TOKENS, limits.max_num_batched_tokens) + 1)
    step = layout.CONTEXT_STEP_TOKENS
    contexts = np.arange(0.0, max(layout.VIDUR_TOKENS, max_model_len) + step, step)
    batches = np.arange(1.0, max(layout.HIGHEST_BATCH, limits.max_num_seqs) + 1)
    axes = {PREFILL: (contexts, tokens**2), DECODE: (batches, contexts)}
    ops, fits = {}, []
    for name, sample in samples.items():
        x = np.stack([sample.x[:, 1], sample.x[:, 0] ** 2], axis=1) if name == PREFILL else sample.x
        forest = regression.fit_forest(x, sample.ms, search_grid=estimator == "random_forest_grid")
        fits.append(_operator_fit(name, forest.oob_prediction_, sample.ms))
        values = regression.predict(forest, *axes.get(name, (tokens,)))
        token_axis = int(name == PREFILL)  # an entry for no tokens is prepended to it
        ops[name] = np.pad(values, [(int(axis == token_axis), 0) for axis in range(values.ndim)])
    return layout.compose(ops, model, stages, source), FitReport(estimator, "out of bag", tuple(fits))
