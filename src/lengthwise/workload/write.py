"""Workloads to files, in our own format or in one that other tools read."""

from __future__ import annotations

import gzip
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lengthwise.schema.errors import OutputError, UnknownNameError
from lengthwise.schema.files import write_whole
from lengthwise.schema.workload import Workload
from lengthwise.workload._parquet import write_parquet

if TYPE_CHECKING:
    import polars as pl

_BY_SUFFIX = {".parquet": "parquet", ".csv": "vidur", ".jsonl": "mooncake"}
WRITABLE = ("azure", "mooncake", "parquet", "vidur")
"""What ``write(format=)`` may name."""


def write(workload: Workload, path: Path | str, format: str | None = None) -> None:  # noqa: A002
    """The workload in a file, which is written whole or not at all.

    Only Parquet keeps everything. The others keep arrivals and lengths, Vidur's also tenants, Mooncake's
    those, "block_ids" and "session", and Azure's rounds times to 100 ns and starts them at 1970-01-01.
    None of them has a place for a concurrency, so that a closed loop must go to Parquet. A name that ends
    in .gz is packed.

    Args:
        workload: What to write.
        path: Its ending tells the format: .parquet (our own), .csv (Vidur's), .jsonl (Mooncake's).
        format: "azure", "mooncake", "parquet" or "vidur", whatever the name.

    Raises:
        OutputError: The format is not clear, cannot hold the workload, or the file cannot be written.
        UnknownNameError: There is no such format.
        InputError: Requests come after others, for which no format has a place.
    """
    workload.require_nobody_after("a file")
    path = Path(path)
    packed = path.suffix.lower() == ".gz"
    suffix = (path.with_suffix("") if packed else path).suffix.lower()
    chosen = format or _BY_SUFFIX.get(suffix)
    if chosen is None:
        raise OutputError(f"{path}: the name must end in {', '.join(_BY_SUFFIX)}, or a format be given")
    if chosen not in WRITABLE:
        raise UnknownNameError("format to write", chosen, WRITABLE)
    if chosen != "parquet" and workload.concurrency is not None:
        raise OutputError(f"{path}: the format {chosen} cannot hold a closed loop; write a .parquet file")
    writer = partial(_WRITERS[chosen], workload)
    write_whole(path, partial(_packed, writer) if packed else writer)


def _packed(writer: partial[None], path: Path) -> None:
    writer(path)
    # No time in the header: the same workload gives the same bytes.
    path.write_bytes(gzip.compress(path.read_bytes(), compresslevel=6, mtime=0))


def _vidur(workload: Workload, path: Path) -> None:
    frame = _frame(workload, ("arrived_at", "num_prefill_tokens", "num_decode_tokens"), workload.arrival_s)
    frame = _with_tenants(workload, frame)
    with path.open("wb") as file:  # by its name polars would guess a compression
        frame.write_csv(file)


def _azure(workload: Workload, path: Path) -> None:
    import polars as pl

    ns = pl.Series(np.rint(workload.arrival_s * 1e7).astype(np.int64) * 100)
    dates = ns.cast(pl.Datetime("ns")).dt.strftime("%Y-%m-%d %H:%M:%S%.9f").str.head(-2)
    with path.open("wb") as file:
        _frame(workload, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), dates).write_csv(file)


def _mooncake(workload: Workload, path: Path) -> None:
    import polars as pl

    arrival_ms = workload.arrival_s * 1e3
    if (arrival_ms == np.rint(arrival_ms)).all():  # as Mooncake writes them
        arrival_ms = arrival_ms.astype(np.int64)
    frame = _frame(workload, ("timestamp", "input_length", "output_length"), arrival_ms)
    if "block_ids" in workload.extra:
        ids = [np.asarray(row).tolist() for row in workload.extra["block_ids"]]
        frame = frame.with_columns(pl.Series("hash_ids", ids, dtype=pl.List(pl.Int64)))
    if "session" in workload.extra:
        frame = frame.with_columns(pl.Series("session_id", workload.extra["session"]))
    frame = _with_tenants(workload, frame)
    with path.open("wb") as file:
        frame.write_ndjson(file)


def _with_tenants(workload: Workload, frame: pl.DataFrame) -> pl.DataFrame:
    import polars as pl

    return frame if workload.tenant is None else frame.with_columns(pl.Series("tenant", workload.tenant))


def _frame(workload: Workload, names: tuple[str, str, str], times: object) -> pl.DataFrame:
    import polars as pl

    return pl.DataFrame(
        dict(zip(names, (times, workload.prompt_tokens, workload.output_tokens), strict=True))
    )


_WRITERS = {"azure": _azure, "mooncake": _mooncake, "parquet": write_parquet, "vidur": _vidur}
