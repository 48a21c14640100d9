"""Reads requests with their outputs from files: data sets, serving logs, benchmark results."""

from __future__ import annotations

import csv
import difflib
import gzip
import hashlib
import io
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.predict.contract import Ints, Prompts, Samples, by_prompt, split_rows
from lengthwise.predict.distribution import Floats
from lengthwise.predict.features import prompt_words
from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import UNCAPPED, estimated_tokens

Bools = npt.NDArray[np.bool_]

NAMES: dict[str, tuple[str, ...]] = {
    "prompt": ("prompt", "instruction", "question", "query", "input_text", "messages", "conversations", "input"),
    "output": ("output", "response", "completion", "generated_text", "answer", "output_text", "text"),
    "output_tokens": (
        "output_tokens", "completion_tokens", "num_output_tokens", "output_length", "output_len", "generatedtokens",
        "generated_tokens", "response_tokens", "num_decode_tokens", "output_toks", "token_len", "n_output_tokens",
    ),
    "prompt_tokens": (
        "prompt_tokens", "input_tokens", "input_length", "prompt_len", "contexttokens", "prompt_length", "input_toks",
        "num_prefill_tokens", "request_tokens",
    ),
    "model": ("model", "generator", "model_name", "model_id", "engine"),
    "finish_reason": ("finish_reason", "stop_reason", "finished_reason"),
    "max_tokens": ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens"),
}  # fmt: skip
"""Accepted names of each column; the first in this order counts. Case does not matter, and spaces are underscores."""
CENSORED = frozenset({"length", "max_tokens", "max_output_tokens", "model_length"})
"""Finish reasons of censored outputs."""
FAILED = frozenset({"error", "abort", "aborted", "cancelled", "canceled", "content_filter"})
"""Finish reasons of failed requests, whose length is unknown."""
FINISHED = frozenset(
    {"stop", "end_turn", "eos", "eos_token", "end", "stop_sequence", "complete", "completed", "finished", "tool_calls",
     "tool_use", "function_call"}
)  # fmt: skip
"""Finish reasons of complete outputs."""

MAX_TOKENS = 10**9
_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"
_TIMES = {
    "arrival_s": 1.0, "arrived_at": 1.0, "arrival_time": 1.0, "arrival": 1.0, "timestamp": 1.0, "start_time": 1.0,
    "created": 1.0, "created_at": 1.0, "time": 1.0,
}  # fmt: skip
_UNITS_S = {"ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_TIMES |= {f"{name.removesuffix('_s')}_{unit}": seconds for name in _TIMES for unit, seconds in _UNITS_S.items()}
"""Accepted names of the column of arrival times, with seconds per unit; the first in this order counts."""
_TIME_WORDS = {"ts", "t", "time", "timestamp", "timestamps", "date", "datetime", "arrival", "arrived", "when"}
"""Words of names that look like those of arrival times."""


@dataclass(frozen=True)
class Row:
    """One request of a file; unknown values are None, and ``finish`` is the finish reason in lower case."""

    prompt: str | None
    output: str | None
    output_tokens: int | None
    prompt_tokens: int | None
    model: str | None
    finish: str | None
    max_tokens: Any = None  # the client's limit as it is in the file

    @property
    def tokens(self) -> int | None:
        """Return ``output_tokens``, or else an estimate from the text ``output``; None if both are unknown."""
        if self.output_tokens is not None:
            return self.output_tokens
        return None if self.output is None else (estimated_tokens(self.output) if self.output else 0)


def row_of(raw: Mapping[str, Any]) -> Row:
    """Return the request in one row of a file.

    The row is a flat table, a conversation, a chat completion, or a line of an OpenAI batch. Raises ValueError if a
    count is not an integer from 0 to MAX_TOKENS, or a message is not an object.
    """
    found = _flattened(raw)
    messages = _first(found, "prompt")
    prompt, output = _text(messages), _text(_first(found, "output"))
    if isinstance(messages, list):
        prompt, answer = _conversation(messages)
        output = output if output is not None else answer
    elif "instruction" in found and isinstance(found.get("input"), str) and found["input"].strip():
        prompt = f"{str(prompt).strip()}\n\n{found['input'].strip()}"
    return Row(
        prompt,
        output,
        _count(_first(found, "output_tokens"), "output_tokens"),
        _count(_first(found, "prompt_tokens"), "prompt_tokens"),
        _text(_first(found, "model")),
        (_text(_first(found, "finish_reason")) or "").strip().lower() or None,
        _first(found, "max_tokens"),
    )


def _flattened(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row with the contents of an OpenAI request and response at the top level."""
    flat = {str(key).strip().lower().replace(" ", "_"): value for key, value in raw.items()}
    for outer in ("request", "body", "response"):
        inner = _table(flat.get(outer))
        if inner is not None:
            del flat[outer]
            flat |= _flattened(inner)
    usage = _table(flat.get("usage"))
    if usage is not None:
        flat |= {key: usage[key] for key in ("completion_tokens", "prompt_tokens") if usage.get(key) is not None}
    choices = flat.pop("choices", None)
    if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
        choice = choices[0]
        message = choice.get("message") or {}
        if not isinstance(message, Mapping):
            raise ValueError(f"the message of a choice must be a table with its content; it is {message!r:.60}")
        flat["output"] = message.get("content") if message else choice.get("text")
        flat["finish_reason"] = choice.get("finish_reason")
    return flat


def _table(value: Any) -> Mapping[str, Any] | None:
    """Return a JSON object, which may also be encoded as a text; None for other values."""
    if isinstance(value, str) and value.startswith("{") and ('"choices"' in value or '"messages"' in value):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, Mapping) else None


def _first(found: Mapping[str, Any], column: str) -> Any:
    for name in NAMES[column]:
        value = found.get(name)
        if value is not None and not (isinstance(value, float) and math.isnan(value)):
            return value
    return None


def _conversation(messages: Sequence[Any]) -> tuple[str, str | None]:
    """Return the prompt, which is all messages before the last answer, and this answer (None: there is none)."""
    turns = []
    for message in messages:
        if isinstance(message, Mapping):
            role = str(message.get("role", message.get("from", "")))
            is_answer = role in ("assistant", "gpt", "bot", "model")
            turns.append((is_answer, _text(message.get("content", message.get("value"))) or ""))
        else:
            turns.append((False, str(message)))
    answers = [i for i, (is_answer, _) in enumerate(turns) if is_answer]
    end = answers[-1] if answers else len(turns)
    return "\n\n".join(text for _, text in turns[:end]), turns[end][1] if answers else None


def _text(value: Any) -> str | None:
    if isinstance(value, list):
        parts = [part.get("text", "") if isinstance(part, Mapping) else str(part) for part in value]
        return "".join(parts)
    return value if value is None or isinstance(value, str) else str(value)


def _count(value: Any, column: str) -> int | None:
    if value is None or value == "":
        return None
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (math.isfinite(number) and number == int(number)) or not 0 <= number <= MAX_TOKENS:
        raise ValueError(f"{column} must be a whole number from 0 to {MAX_TOKENS:,}; it is {value!r:.60}")
    return int(number)


def misspelt(keys: Iterable[str]) -> dict[str, str]:
    """Return the unknown keys that resemble the name of a missing column, each with that name."""
    flat = {key.strip().lower().replace(" ", "_") for key in keys}
    known = {name: column for column, names in NAMES.items() for name in names}
    absent = [name for name, column in known.items() if not flat & {*NAMES[column]}]
    near = {key: difflib.get_close_matches(key, absent, n=1, cutoff=0.75) for key in sorted(flat - {*known})}
    return {key: found[0] for key, found in near.items() if found}


def unread_time(columns: Iterable[str], read: Collection[str] = _TIMES) -> dict[str, str]:
    """Return the first column whose name looks like a time of arrival, with our name of it for its unit ("arrival_ms").

    {} if there is none, or a column has one of the names ``read``.
    """
    flat = {column.strip().lower().replace(" ", "_"): column for column in columns}
    for name, column in {} if flat.keys() & set(read) else flat.items():
        words = re.split(r"[^a-z]+", name)
        if _TIME_WORDS.intersection(words):
            return {column: f"arrival_{next((unit for unit in _UNITS_S if unit in words), 's')}"}
    return {}


def renaming(keys: Iterable[str]) -> str:
    """Return how to rename columns that resemble missing ones: ". Rename: in_tok to prompt_tokens"; "" for none."""
    columns = {name: column for column, names in NAMES.items() for name in names}
    given = {key.strip().lower().replace(" ", "_"): key for key in keys}
    near = [f"{given[key]} to {columns[name]}" for key, name in misspelt(given.values()).items()]
    return f". Rename: {', '.join(near)}" if near else ""


def read(files: Sequence[Path | str] | Path | str, *, model: str | None = None) -> Samples:
    """Return the samples in JSONL, JSON, CSV or Parquet files, in their order; files may be gzipped.

    Each row is a request with its prompt (``prompt``, ``instruction``, ``messages``, ...), its output (``output``,
    ``response``, ...) or its number of output tokens (``output_tokens``, ...), its ``model`` and its ``finish_reason``.
    Rows may be lines of an OpenAI batch, logged chat completions, ShareGPT conversations, and results of ``vllm bench
    serve --save-detailed``. The prompts of a batch are in its input file, so ``files`` should include this file.
    Unknown token counts are estimated from the text. Requests that ended at a length limit are censored; failed and
    empty ones are left out. ``model`` is the model of rows that name none. Raises InputError if a file is missing or
    damaged, a row has neither an output nor its length, or no request is left.
    """
    paths = [Path(f) for f in ([files] if isinstance(files, Path | str) else files)]
    if not paths:
        raise InputError("at least one file of requests with outputs is needed; none was given")
    rows: list[Row] = []
    keys: set[str] = set()
    prompts: dict[str, str] = {}
    without_prompt: list[tuple[int, str]] = []
    for path in paths:
        for number, raw in _raw_rows(path):
            row, request_id = _parsed(raw, path, number), raw.get("custom_id")
            if request_id is not None and "response" not in raw and row.tokens is None:
                prompts[str(request_id)] = row.prompt or ""
                continue
            _require_output(row, raw, path, number)
            if request_id is not None and row.prompt is None:
                without_prompt.append((len(rows), str(request_id)))
            rows.append(row)
            keys.update(map(str, raw))
    for at, request_id in without_prompt:
        rows[at] = replace(rows[at], prompt=prompts.get(request_id))
    return _samples(rows, paths, model, keys)


def read_prompts(file: Path | str) -> list[str]:
    """Return the distinct prompts of a file.

    The file has rows as for ``read``, but needs no outputs; a .txt file has one prompt per line. Raises InputError if
    the file is missing or damaged, or a row has no prompt.
    """
    path = Path(file)
    if path.suffix == ".txt" and path.exists():
        lines = (line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines())
        return list(dict.fromkeys(filter(None, lines)))
    prompts: dict[str, None] = {}
    for number, raw in _raw_rows(path):
        prompt = _parsed(raw, path, number).prompt
        if prompt is None:
            raise InputError(f"{path}, row {number} must have a prompt; it has {', '.join(map(str, raw))}")
        prompts[prompt] = None
    return list(prompts)


@dataclass(frozen=True)
class Split:
    """Training and test samples that have no common prompt.

    ``prompts`` is the number of distinct prompts before near-duplicates were removed, and ``repeated`` the number of
    the other samples. ``near_duplicates`` is the number of held-out prompts that resemble a training prompt. They are
    removed, unless fewer than MIN_TEST_PROMPTS would be left (``includes_near_duplicates``). If the samples have
    groups, such as sessions, ``prompts`` counts these, and near-duplicates are not searched.
    """

    train: Samples
    test: Samples
    prompts: int
    repeated: int
    near_duplicates: int
    includes_near_duplicates: bool


SIMILARITY, MIN_TEST_PROMPTS = 0.6, 20
"""The Jaccard similarity of near-duplicates, and the number of held-out prompts that must be left without them."""


def near_duplicates(texts: Sequence[str], others: Sequence[str], similarity: float = SIMILARITY) -> Bools:
    """Return whether each prompt resembles one of ``others``, [n].

    Two prompts resemble each other if the Jaccard similarity of their word bigrams is at least ``similarity``. The
    result is exact although only the rarest bigrams of each prompt are indexed: two sets with this similarity have at
    least one of these bigrams in common (prefix filter, Chaudhuri, Ganti and Kaushik 2006).
    """
    first, second = ([_bigrams(text) for text in some] for some in (texts, others))
    count = Counter(chain.from_iterable([*first, *second]))

    def rarest(bigrams: frozenset[str]) -> list[str]:
        prefix = len(bigrams) - math.ceil(similarity * len(bigrams) - 1e-9) + 1
        return sorted(bigrams, key=lambda bigram: (count[bigram], bigram))[:prefix]

    index: dict[str, list[int]] = {}
    for row, bigrams in enumerate(second):
        for bigram in rarest(bigrams):
            index.setdefault(bigram, []).append(row)

    def has_near(bigrams: frozenset[str]) -> bool:
        rows = dict.fromkeys(chain.from_iterable(index.get(bigram, ()) for bigram in rarest(bigrams)))
        return any(len(bigrams & second[r]) >= similarity * len(bigrams | second[r]) - 1e-9 for r in rows)

    return np.array([has_near(bigrams) for bigrams in first], bool)


def _bigrams(text: str) -> frozenset[str]:
    words = prompt_words(text.lower())
    return frozenset(map(" ".join, pairwise(words))) or frozenset([" ".join(words) or text.strip().lower()])


def split(samples: Samples, share: float = 0.2, seed: int = 0) -> Split:
    """Return training and test samples that have no common prompt; about ``share`` of the prompts are in the test.

    A hash of the prompt decides, so that a prompt is on the same side in every file. Prompts that differ only in case
    or outer whitespace are equal. Near-duplicates of training prompts are removed from the test. Raises InputError if
    ``share`` is not between 0 and 1, there are no texts, or a part would be empty. Samples with groups, such as
    sessions, are split by these instead, drawn with ``seed``.
    """
    if not 0 < share < 1:
        raise InputError(f"the share of the test must be between 0 and 1; it is {share}")
    if samples.group is not None:
        groups = len(np.unique(samples.group))
        train_rows, test_rows = split_rows(samples, share, seed)
        repeated = len(samples) - groups
        return Split(
            samples.take(train_rows), samples.take(test_rows), groups, repeated, 0, includes_near_duplicates=False
        )
    texts = samples.prompts.text
    if texts is None:
        raise InputError("samples are split by prompt, so they must have texts of prompts; these have none")
    distinct, prompt = by_prompt(texts)
    digests = [hashlib.sha256(f"{seed}:{text}".encode("utf-8", "replace")).digest() for text in distinct]
    drawn = np.array([int.from_bytes(digest[:7], "big") / 2**56 for digest in digests])
    if len(distinct) < 2:
        raise InputError(f"at least two different prompts are needed to hold some out; there is {len(distinct)}")
    is_test = drawn < share
    if is_test.all() or not is_test.any():
        is_test = drawn <= np.sort(drawn)[min(len(drawn) - 2, int(share * len(drawn)))]
    own, held_out = ([distinct[i] for i in np.flatnonzero(rows)] for rows in (~is_test, is_test))
    is_near = np.zeros(len(distinct), bool)
    is_near[is_test] = near_duplicates(held_out, own)
    found = int(is_near.sum())
    too_few = found > 0 and len(held_out) - found < MIN_TEST_PROMPTS
    in_test = is_test if too_few else is_test & ~is_near
    train, test = (samples.take(np.flatnonzero(rows[prompt])) for rows in (~is_test, in_test))
    return Split(train, test, len(distinct), len(texts) - len(distinct), found, too_few)


def _samples(rows: list[Row], paths: Sequence[Path], model: str | None, keys: set[str]) -> Samples:
    sources = ", ".join(str(path) for path in paths)
    if not rows:
        raise InputError(f"{sources} must hold requests with outputs; there is none")
    good = [r for r in rows if r.tokens and (r.finish or "") not in FAILED]
    if not good:
        raise InputError(f"all {len(rows)} outputs in {sources} are empty or failed; at least one must be complete")
    unknown = Counter(r.finish for r in good if r.finish and r.finish not in CENSORED | FAILED | FINISHED)
    censored = [(r.finish or "") in CENSORED for r in good]
    warnings: dict[str, Any] = {"no_prompt": sum(not r.prompt for r in good), "misspelt": misspelt(keys)}
    warnings["unknown_finish"] = dict(unknown.most_common(5))
    metadata = {
        "sources": [path.name for path in paths],
        "left_out": len(rows) - len(good),
        "estimated_tokens": sum(r.output_tokens is None for r in good),
        "censored": sum(censored),
        **{name: value for name, value in warnings.items() if value},
    }
    names = [r.model or model for r in good]
    counts = [r.prompt_tokens for r in good]
    prompts = Prompts(
        len(good),
        text=[r.prompt or "" for r in good] if any(r.prompt is not None for r in good) else None,
        prompt_tokens=np.array(counts, np.int64) if all(c is not None for c in counts) else None,
        model=[name or "" for name in names] if any(names) else None,
    )
    return Samples(
        prompts,
        np.array([r.tokens for r in good], np.int64),
        np.array(censored, bool),
        [r.output or "" for r in good] if any(r.output is not None for r in good) else None,
        metadata,
    )


def _parsed(raw: dict[str, Any], path: Path, number: int) -> Row:
    try:
        return row_of(raw)
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}, row {number}: {error}") from error
    except RecursionError:
        raise _nesting_error(path, number) from None


def _located_count(value: Any, column: str, path: Path, number: int) -> int | None:
    try:
        return _count(value, column)
    except ValueError as error:
        raise InputError(f"{path}, row {number}: {error}") from error


def _nesting_error(path: Path, number: int) -> InputError:
    return InputError(f"{path}, row {number} must be JSON of a few levels; it is nested too deeply to be read")


def _require_output(row: Row, raw: dict[str, Any], path: Path, number: int) -> None:
    if row.tokens is not None or (row.finish or "") in FAILED or raw.get("error"):
        return
    lacking = sum(value is None for value in raw.values())
    if lacking and path.name.removesuffix(".gz").endswith(".csv"):
        cells = f"must have {len(raw)} cells like the header; it has {len(raw) - lacking} (cut off?)"
        raise InputError(f"{path}, row {number} {cells}")
    raise InputError(
        f"{path}, row {number} must have an output ({', '.join(NAMES['output'][:3])}, ...) or its tokens "
        f"({', '.join(NAMES['output_tokens'][:2])}, ...); it has {', '.join(map(str, raw)) or 'nothing'}"
        f"{renaming(map(str, raw))}"
    )


def _raw_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
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
        raise InputError(f"{path} must be text in UTF-8, or Parquet; byte {error.start} is neither") from error
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
        complete = json.loads(text) if text.lstrip()[0] in "[{" else None
    except (ValueError, RecursionError):  # parsing line by line gives the number of the row
        complete = None
    if isinstance(complete, list):
        rows = list(enumerate(complete, 1))
    elif isinstance(complete, dict):
        rows = list(enumerate(_bench_rows(complete), 1))
    else:
        rows = [(n, _line(line, path, n)) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    for number, row in rows:
        if not isinstance(row, dict):
            raise InputError(f"{path}, row {number} must be a JSON object; it is {type(row).__name__}")
        yield number, row


def _line(line: str, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise InputError(f"{path}, row {number} must be JSON: {error}") from error
    except RecursionError:
        raise _nesting_error(path, number) from None


def _bench_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    lengths = result.get("output_lens")
    if not isinstance(lengths, list):
        return [result]
    columns = {"output_tokens": lengths, "prompt_tokens": result.get("input_lens")}
    columns |= {"output": result.get("generated_texts"), "prompt": result.get("prompts")}
    known = {k: v for k, v in columns.items() if isinstance(v, list) and len(v) == len(lengths)}
    model = result.get("model_id")
    return [{"model": model} | {k: v[i] for k, v in known.items()} for i in range(len(lengths))]


@dataclass(frozen=True)
class Served:
    """The successful requests of a log.

    ``prompt_tokens`` and ``output_tokens`` [n] are the counts in the log, or else estimates from the texts; a prompt
    without count and text has 1 token. A censored output has its observed length. ``texts`` maps "prompt", "output" and
    "model" to columns [n]; a column that no row has is missing. ``arrival_s`` [n] are times on the log's clock, or
    None. ``max_tokens`` [n] are the clients' limits, or UNCAPPED; None without any. A limit below an estimated output
    is raised to it. ``estimated`` counts requests with an estimated length, ``left_out`` rows that failed or are empty.
    """

    prompt_tokens: Ints
    output_tokens: Ints
    texts: dict[str, Any]
    arrival_s: Floats | None
    max_tokens: Ints | None
    estimated: int
    left_out: int


def served(file: Path | str) -> Served:
    """Return the successful requests of a file that ``read`` can read, in its order.

    Raises InputError as ``read`` does, and if only some rows have an arrival time, or no request is left.
    """
    path = Path(file)
    rows, times, caps, left_out = [], [], [], 0
    for number, raw in _raw_rows(path):
        row = _parsed(raw, path, number)
        _require_output(row, raw, path, number)
        if not row.tokens or (row.finish or "") in FAILED:
            left_out += 1
            continue
        rows.append(row)
        unlimited = str(row.max_tokens).strip() == "-1"  # as some clients write it
        cap = UNCAPPED if unlimited else _located_count(row.max_tokens, "max_tokens", path, number) or UNCAPPED
        caps.append(cap if row.output_tokens is not None else max(cap, row.tokens))
        times.append(_arrival_s(raw, path, number))
        if (times[-1] is None) != (times[0] is None):
            raise InputError(f"{path}: all rows or no row must have an arrival time; row {number} differs")
    if not rows:
        raise InputError(f"{path} must hold a request with an output; there is none")
    if all(row.prompt_tokens is None and (row.prompt or "").strip().isdigit() for row in rows):
        raise InputError(
            f"{path}: prompts must be texts; all are numbers, such as {rows[0].prompt}. If they are numbers of tokens, "
            "name the column prompt_tokens, and that of the outputs output_tokens"
        )
    estimated = (estimated_tokens(row.prompt) if row.prompt else 1 for row in rows)
    prompt_tokens = [e if r.prompt_tokens is None else r.prompt_tokens for r, e in zip(rows, estimated, strict=True)]
    texts = {name: [getattr(row, name) for row in rows] for name in ("prompt", "output", "model")}
    return Served(
        np.maximum(np.array(prompt_tokens, np.int64), 1),
        np.array([row.tokens for row in rows], np.int64),
        {name: np.array([v or "" for v in c], object) for name, c in texts.items() if any(v is not None for v in c)},
        None if times[0] is None else np.array(times, float),
        np.array(caps, np.int64) if min(caps) < UNCAPPED else None,
        sum(r.output_tokens is None or r.prompt_tokens is None for r in rows),
        left_out,
    )


def _arrival_s(raw: Mapping[str, Any], path: Path, number: int) -> float | None:
    found = {str(key).strip().lower(): value for key, value in raw.items()}
    name = next((name for name in _TIMES if found.get(name) not in (None, "")), None)
    if name is None:
        return None
    value = found[name]
    try:
        seconds = float(value) * _TIMES[name]
    except (TypeError, ValueError):
        try:
            date = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
            seconds = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
        except ValueError:
            seconds = math.nan
    if not math.isfinite(seconds):
        raise InputError(f"{path}, row {number}: {name} must be seconds or a date; it is {value!r:.60}")
    return seconds
