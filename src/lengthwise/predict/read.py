"""Samples from files: requests with their outputs, as data sets and serving logs hold them."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.predict._doubts import doubts, hint
from lengthwise.predict._holdout import by_prompt
from lengthwise.predict._rows import CUT, FAILED, NAMES, Row, row_of
from lengthwise.predict.contract import Prompts, Samples
from lengthwise.schema.errors import InputError

_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"


def read(files: Sequence[Path | str] | Path | str, *, model: str | None = None) -> Samples:
    """The samples of JSONL, JSON, CSV or Parquet files, gzipped or not, one after the other.

    A row is a request: its prompt (``prompt``, ``instruction``, ``messages``, ...), its output
    (``output``, ``response``, ...) or how many tokens it had (``output_tokens``, ...), the ``model``
    and the ``finish_reason``. Lines of an OpenAI batch, logged chat completions, ShareGPT conversations
    and results of ``vllm bench serve --save-detailed`` are understood too; the prompts of a batch
    come from its input file, given beside it. Tokens that nobody counted are estimated from the text.
    A request that ended for its length is censored; one that failed or put out nothing is left out.

    Args:
        files: One or several.
        model: Name for rows that do not tell their model.

    Raises:
        InputError: A file is missing or damaged, or a row has neither an output nor its length.
    """
    paths = [Path(f) for f in ([files] if isinstance(files, Path | str) else files)]
    if not paths:
        raise InputError("at least one file of requests with outputs is needed; none was given")
    rows: list[Row] = []
    keys: set[str] = set()
    asked: dict[str, str] = {}
    late: list[tuple[int, str]] = []
    for path in paths:
        for number, raw in _raw_rows(path):
            row, place = _told(raw, path, number), raw.get("custom_id")
            if place is not None and "response" not in raw and row.tokens is None:
                asked[str(place)] = row.prompt or ""
                continue
            if row.tokens is None and (row.finish or "") not in FAILED and not raw.get("error"):
                raise InputError(_nothing(path, number, raw))
            if place is not None and row.prompt is None:
                late.append((len(rows), str(place)))
            rows.append(row)
            keys.update(map(str, raw))
    for at, place in late:
        rows[at] = replace(rows[at], prompt=asked.get(place))
    return _samples(rows, paths, model, keys)


def read_prompts(file: Path | str) -> list[str]:
    """The different prompts of a file: rows as ``read`` takes them, outputs not needed, or text, one a line.

    Raises:
        InputError: The file is missing or damaged, or a row has no prompt.
    """
    path = Path(file)
    if path.suffix == ".txt" and path.exists():
        found = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
        return list(dict.fromkeys(line for line in found if line))
    prompts = []
    for number, raw in _raw_rows(path):
        prompt = _told(raw, path, number).prompt
        if prompt is None:
            raise InputError(f"{path}, row {number} must have a prompt; it has {', '.join(map(str, raw))}")
        prompts.append(prompt)
    return list(dict.fromkeys(prompts))


@dataclass(frozen=True)
class Split:
    """Two parts that share no prompt.

    Attributes:
        train: To learn from.
        test: To be judged by.
        prompts: Different prompts in both.
        repeated: Samples whose prompt had come before; they stand on one side together.
    """

    train: Samples
    test: Samples
    prompts: int
    repeated: int


def split(samples: Samples, share: float = 0.2, seed: int = 0) -> Split:
    """Parts by prompt: its hash decides, so that a prompt stands on the same side in every file.

    Prompts that differ in case, or in blanks at their edges, are the same.

    Raises:
        InputError: ``share`` is not between 0 and 1, there are no texts, or a part would be empty.
    """
    if not 0 < share < 1:
        raise InputError(f"the share of the test must be between 0 and 1; it is {share}")
    texts = samples.prompts.text
    if texts is None:
        raise InputError("samples are split by prompt, so they must have texts of prompts; these have none")
    distinct, prompt = by_prompt(texts)
    drawn = np.array([_drawn(text, seed) for text in distinct])
    held = drawn < share
    if len(distinct) < 2:
        raise InputError(
            f"at least two different prompts are needed to hold some out; there is {len(distinct)}"
        )
    if held.all() or not held.any():
        held = drawn <= np.sort(drawn)[min(len(drawn) - 2, int(share * len(drawn)))]
    test = held[prompt]
    return Split(
        samples.take(np.flatnonzero(~test)),
        samples.take(np.flatnonzero(test)),
        len(distinct),
        len(texts) - len(distinct),
    )


def _drawn(text: str, seed: int) -> float:
    digest = hashlib.sha256(f"{seed}:{text}".encode("utf-8", "replace")).digest()
    return int.from_bytes(digest[:7], "big") / 2**56


def _samples(rows: list[Row], paths: Sequence[Path], model: str | None, keys: set[str]) -> Samples:
    told = ", ".join(str(path) for path in paths)
    if not rows:
        raise InputError(f"{told} must hold requests with outputs; there is none")
    kept = [r for r in rows if r.tokens and (r.finish or "") not in FAILED]
    if not kept:
        raise InputError(
            f"all {len(rows)} outputs in {told} are empty or failed; at least one must have come"
        )
    facts = {
        "sources": [path.name for path in paths],
        "left_out": len(rows) - len(kept),
        "estimated_tokens": sum(r.output_tokens is None for r in kept),
        "censored": sum((r.finish or "") in CUT for r in kept),
        **doubts(kept, keys),
    }
    names = [r.model or model for r in kept]
    counts = [r.prompt_tokens for r in kept]
    prompts = Prompts(
        len(kept),
        text=[r.prompt or "" for r in kept] if any(r.prompt is not None for r in kept) else None,
        prompt_tokens=np.array(counts, np.int64) if all(c is not None for c in counts) else None,
        model=[name or "" for name in names] if any(names) else None,
    )
    return Samples(
        prompts,
        np.array([r.tokens for r in kept], np.int64),
        np.array([(r.finish or "") in CUT for r in kept], bool),
        [r.output or "" for r in kept] if any(r.output is not None for r in kept) else None,
        facts,
    )


def _told(raw: dict[str, Any], path: Path, number: int) -> Row:
    try:
        return row_of(raw)
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}, row {number}: {error}") from error
    except RecursionError:
        raise InputError(_too_deep(path, number)) from None


def _too_deep(path: Path, number: int) -> str:
    return f"{path}, row {number} must be JSON of a few levels; it is nested too deeply to be read"


def _nothing(path: Path, number: int, raw: dict[str, Any]) -> str:
    return (
        f"{path}, row {number} must have an output ({', '.join(NAMES['output'][:3])}, ...) or its tokens "
        f"({', '.join(NAMES['output_tokens'][:2])}, ...); it has {', '.join(map(str, raw)) or 'nothing'}{hint(raw)}"
    )


def _raw_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows with their numbers, from 1."""
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data.startswith(_GZIP) else data
    except FileNotFoundError:
        raise InputError(f"there is no file {path}") from None
    except (OSError, EOFError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if data.startswith(_PARQUET):
        yield from enumerate(_parquet(data, path), 1)
        return
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} must be text in UTF-8, or Parquet; byte {error.start} is neither"
        ) from error
    if not text.strip():
        raise InputError(f"{path} is empty; it must hold requests with outputs")
    if path.name.removesuffix(".gz").endswith(".csv"):
        csv.field_size_limit(1 << 30)
        yield from enumerate(csv.DictReader(io.StringIO(text)), 1)
    else:
        yield from _json_rows(text, path)


def _parquet(data: bytes, path: Path) -> Iterator[dict[str, Any]]:
    import polars as pl

    try:
        yield from pl.read_parquet(io.BytesIO(data)).iter_rows(named=True)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise InputError(f"{path}: the Parquet file is cut off or damaged") from error


def _json_rows(text: str, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        whole = json.loads(text) if text.lstrip()[0] in "[{" else None
    except (ValueError, RecursionError):  # line by line the number of the row can be told
        whole = None
    if isinstance(whole, list):
        lines = list(enumerate(whole, 1))
    elif isinstance(whole, dict):
        lines = list(enumerate(_bench(whole), 1))
    else:
        lines = [(n, _line(line, path, n)) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    for number, row in lines:
        if not isinstance(row, dict):
            raise InputError(f"{path}, row {number} must be a JSON object; it is {type(row).__name__}")
        yield number, row


def _line(line: str, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise InputError(f"{path}, row {number} must be JSON: {error}") from error
    except RecursionError:
        raise InputError(_too_deep(path, number)) from None


def _bench(whole: dict[str, Any]) -> list[dict[str, Any]]:
    """The requests of a benchmark's result with a list a column; another object is one row."""
    lengths = whole.get("output_lens")
    if not isinstance(lengths, list):
        return [whole]
    columns = {
        "output_tokens": lengths,
        "prompt_tokens": whole.get("input_lens"),
        "output": whole.get("generated_texts"),
        "prompt": whole.get("prompts"),
    }
    known = {k: v for k, v in columns.items() if isinstance(v, list) and len(v) == len(lengths)}
    model = whole.get("model_id")
    return [{"model": model} | {k: v[i] for k, v in known.items()} for i in range(len(lengths))]
