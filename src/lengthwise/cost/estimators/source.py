"""Cost tables straight from a profile's file, kept once they are built."""

from __future__ import annotations

from pathlib import Path

from lengthwise.cost._profile_cache import cache_path, read_cache, write_cache
from lengthwise.cost._profile_report import FitReport
from lengthwise.cost.estimators.fit import ESTIMATORS, fit_profile
from lengthwise.cost.profiles import read_profile
from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.deployment import EngineLimits, Parallelism
from lengthwise.schema.errors import ProfileError, UnknownNameError
from lengthwise.schema.hardware import GpuSpec, NodeSpec
from lengthwise.schema.model import ModelSpec


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
