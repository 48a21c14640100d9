"""Cost tables from Vidur's profiles, by its own estimator or by a monotone interpolation."""

from __future__ import annotations

from pathlib import Path

from lengthwise.cost._profile_cache import cache_path, read_cache, write_cache
from lengthwise.cost._profile_report import FitReport
from lengthwise.cost._vidur_paths import ProfileFiles, find_files
from lengthwise.cost._vidur_rule import HIGHEST_BATCH, VIDUR_TOKENS
from lengthwise.cost.tables import check
from lengthwise.schema.cost_tables import NOT_MEASURED, CostTables
from lengthwise.schema.deployment import EngineLimits, Parallelism
from lengthwise.schema.errors import UnknownNameError
from lengthwise.schema.hardware import NodeSpec
from lengthwise.schema.model import ModelSpec

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
    from lengthwise.cost._vidur_build import Job, forest_tables, monotone_tables
    from lengthwise.cost._vidur_rows import made_up, read_samples

    samples = read_samples(files, model, parallel, limits.block_size)
    build = monotone_tables if estimator == "monotone" else forest_tables
    source = f"Vidur profile {files.mlp.parent.name}, {estimator}"
    if rows := made_up(files, model, parallel.tp):
        source += f"; {rows:,} attention rows at TP {parallel.tp}: {NOT_MEASURED}"
    tables, report = build(samples, Job(model, parallel.pp, limits, max_model_len, source))
    check(tables, source)
    return tables, report
