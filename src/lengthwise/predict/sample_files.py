"""Samples from files: requests with their outputs, as data sets and serving logs hold them."""

from __future__ import annotations

import csv
import difflib
import gzip
import hashlib
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.predict.contract import Ints, Prompts, Samples, by_prompt
from lengthwise.predict.distribution import Floats
from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import estimated_tokens

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
}  # fmt: skip
"""Other names of a column, the first that is there counts; case and spaces do not matter."""
CUT = frozenset({"length", "max_tokens", "max_output_tokens", "model_length"})
"""Reasons to end that mean: the output was cut."""
FAILED = frozenset({"error", "abort", "aborted", "cancelled", "canceled", "content_filter"})
"""Reasons to end that say nothing about the length."""

MAX_TOKENS = 10**9
"""No request has more."""


@dataclass(frozen=True)
class Row:
    """What one request tells; None where it does not."""

    prompt: str | None
    output: str | None
    output_tokens: int | None
    prompt_tokens: int | None
    model: str | None
    finish: str | None
    """In lower case."""

    @property
    def tokens(self) -> int | None:
        """Output tokens, counted or estimated from the text; None where neither is there."""
        if self.output_tokens is not None:
            return self.output_tokens
        return None if self.output is None else (estimated_tokens(self.output) if self.output else 0)


def row_of(raw: Mapping[str, Any]) -> Row:
    """A row in our words, from a flat row, a chat completion, or a line of an OpenAI batch.

    Raises:
        ValueError: A count is not a whole number, or a message is no table.
    """
    found = _unfolded(raw)
    prompt, output = _text(_first(found, "prompt")), _text(_first(found, "output"))
    talk = _first(found, "prompt")
    if isinstance(talk, list):
        prompt, said = _conversation(talk)
        output = output if output is not None else said
    elif "instruction" in found and isinstance(found.get("input"), str) and found["input"].strip():
        prompt = f"{str(prompt).strip()}\n\n{found['input'].strip()}"
    return Row(
        prompt,
        output,
        _count(_first(found, "output_tokens"), "output_tokens"),
        _count(_first(found, "prompt_tokens"), "prompt_tokens"),
        _text(_first(found, "model")),
        (_text(_first(found, "finish_reason")) or "").strip().lower() or None,
    )


def _unfolded(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A flat row: what an OpenAI request and response hold inside comes to the top."""
    flat = {str(key).strip().lower().replace(" ", "_"): value for key, value in raw.items()}
    for outer in ("request", "body", "response"):
        inner = _table(flat.get(outer))
        if inner is not None:
            del flat[outer]
            flat |= _unfolded(inner)
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
    """A JSON object, also one that is written in a text."""
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


def _conversation(turns: Sequence[Any]) -> tuple[str, str | None]:
    """All up to the last answer as the prompt, and that answer, of a list of messages."""
    told = [_turn(turn) for turn in turns]
    last = next((i for i in range(len(told) - 1, -1, -1) if told[i][0]), None)
    if last is None:
        return "\n\n".join(text for _, text in told), None
    return "\n\n".join(text for _, text in told[:last]), told[last][1]


def _turn(turn: Any) -> tuple[bool, str]:
    if not isinstance(turn, Mapping):
        return False, str(turn)
    who = str(turn.get("role", turn.get("from", "")))
    return who in ("assistant", "gpt", "bot", "model"), _text(turn.get("content", turn.get("value"))) or ""


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


FINISHED = frozenset(
    {"stop", "end_turn", "eos", "eos_token", "end", "stop_sequence", "complete", "completed", "finished", "tool_calls",
     "tool_use", "function_call"}
)  # fmt: skip
"""Reasons to end that mean: by itself."""


def warnings(rows: Sequence[Row], keys: Iterable[str]) -> dict[str, Any]:
    """Facts of rows with outputs: how many have no prompt, which reasons to end are unknown, likely misspelt keys."""
    ends = Counter(r.finish for r in rows if r.finish and r.finish not in CUT | FAILED | FINISHED)
    told: dict[str, Any] = {
        "no_prompt": sum(not r.prompt for r in rows),
        "unknown_finish": dict(ends.most_common(5)),
        "misspelt": misspelt(keys),
    }
    return {name: value for name, value in told.items() if value}


def misspelt(keys: Iterable[str]) -> dict[str, str]:
    """Keys that nothing reads, and what each is near to, of what no other key tells."""
    flat = {key.strip().lower().replace(" ", "_") for key in keys}
    known = {name: column for column, names in NAMES.items() for name in names}
    absent = [name for name, column in known.items() if not flat & {*NAMES[column]}]
    near = {key: difflib.get_close_matches(key, absent, n=1, cutoff=0.75) for key in sorted(flat - {*known})}
    return {key: found[0] for key, found in near.items() if found}


def hint(raw: Mapping[str, Any]) -> str:
    """A sentence's end about misspelt keys of a row; empty where there is none."""
    near = [f"{key} (did you mean {name}?)" for key, name in misspelt(map(str, raw)).items()]
    return f"; not understood: {', '.join(near)}" if near else ""


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
            row, place = _report(raw, path, number), raw.get("custom_id")
            if place is not None and "response" not in raw and row.tokens is None:
                asked[str(place)] = row.prompt or ""
                continue
            if row.tokens is None and (row.finish or "") not in FAILED and not raw.get("error"):
                raise InputError(_empty(path, number, raw))
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
        prompt = _report(raw, path, number).prompt
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
        raise InputError(f"at least two different prompts are needed to hold some out; there is {len(distinct)}")
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
        raise InputError(f"all {len(rows)} outputs in {told} are empty or failed; at least one must have come")
    metadata = {
        "sources": [path.name for path in paths],
        "left_out": len(rows) - len(kept),
        "estimated_tokens": sum(r.output_tokens is None for r in kept),
        "censored": sum((r.finish or "") in CUT for r in kept),
        **warnings(kept, keys),
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
        metadata,
    )


def _report(raw: dict[str, Any], path: Path, number: int) -> Row:
    try:
        return row_of(raw)
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}, row {number}: {error}") from error
    except RecursionError:
        raise InputError(_too_deep(path, number)) from None


def _too_deep(path: Path, number: int) -> str:
    return f"{path}, row {number} must be JSON of a few levels; it is nested too deeply to be read"


def _empty(path: Path, number: int, raw: dict[str, Any]) -> str:
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


def _bench(complete: dict[str, Any]) -> list[dict[str, Any]]:
    """The requests of a benchmark's result with a list a column; another object is one row."""
    lengths = complete.get("output_lens")
    if not isinstance(lengths, list):
        return [complete]
    columns = {
        "output_tokens": lengths,
        "prompt_tokens": complete.get("input_lens"),
        "output": complete.get("generated_texts"),
        "prompt": complete.get("prompts"),
    }
    known = {k: v for k, v in columns.items() if isinstance(v, list) and len(v) == len(lengths)}
    model = complete.get("model_id")
    return [{"model": model} | {k: v[i] for k, v in known.items()} for i in range(len(lengths))]


_TIMES = {
    "arrival_s": 1.0, "arrived_at": 1.0, "arrival_time": 1.0, "arrival": 1.0, "timestamp": 1.0, "start_time": 1.0,
    "created": 1.0, "created_at": 1.0, "time": 1.0, "timestamp_ms": 1e-3, "arrival_time_ns": 1e-9,
}  # fmt: skip
"""Names of a column of arrivals, the first that is there counts, and seconds in its unit."""


@dataclass(frozen=True)
class Served:
    """Requests of a log, one a row; failed and empty ones are left out.

    Attributes:
        prompt_tokens: [n] counted, or estimated from the text; 1 where there is neither.
        output_tokens: [n] counted, or estimated. What was cut counts as long as it came.
        texts: Columns "prompt", "output" and "model" of [n] texts, those that any row has.
        arrival_s: [n] seconds on the log's clock; None where no row has any.
        estimated: How many requests had a length estimated.
        left_out: How many rows failed or put out nothing.
    """

    prompt_tokens: Ints
    output_tokens: Ints
    texts: dict[str, Any]
    arrival_s: Floats | None
    estimated: int
    left_out: int


def served(file: Path | str) -> Served:
    """The requests of a file that ``read`` understands, in its order.

    Raises:
        InputError: The file is missing or damaged, a row has neither an output nor its length, some rows
            have a time and others none, or no request is left.
    """
    path = Path(file)
    rows, times, left_out = [], [], 0
    for number, raw in _raw_rows(path):
        row = _report(raw, path, number)
        if row.tokens is None and (row.finish or "") not in FAILED and not raw.get("error"):
            raise InputError(_empty(path, number, raw))
        if not row.tokens or (row.finish or "") in FAILED:
            left_out += 1
            continue
        rows.append(row)
        times.append(_time(raw, path, number))
        if (times[-1] is None) != (times[0] is None):
            raise InputError(f"{path}: all rows must have a time of arrival, or none; row {number} differs")
    if not rows:
        raise InputError(f"{path} must hold a request with an output; there is none")
    return Served(
        np.array([max(1, _prompt_tokens(row)) for row in rows], np.int64),
        np.array([row.tokens for row in rows], np.int64),
        _texts(rows),
        None if times[0] is None else np.array(times, float),
        sum(r.output_tokens is None or r.prompt_tokens is None for r in rows),
        left_out,
    )


def _prompt_tokens(row: Row) -> int:
    if row.prompt_tokens is not None:
        return row.prompt_tokens
    return estimated_tokens(row.prompt) if row.prompt else 1


def _texts(rows: list[Row]) -> dict[str, Any]:
    columns = {name: [getattr(row, name) for row in rows] for name in ("prompt", "output", "model")}
    told = {name: column for name, column in columns.items() if any(v is not None for v in column)}
    return {name: np.array([v or "" for v in column], object) for name, column in told.items()}


def _time(raw: Mapping[str, Any], path: Path, number: int) -> float | None:
    found = {str(key).strip().lower(): value for key, value in raw.items()}
    name = next((name for name in _TIMES if found.get(name) not in (None, "")), None)
    if name is None:
        return None
    value = found[name]
    try:
        seconds = float(value) * _TIMES[name]
    except (TypeError, ValueError):
        seconds = _date(value)
    if not np.isfinite(seconds):
        raise InputError(f"{path}, row {number}: {name} must be seconds or a date; it is {value!r:.60}")
    return seconds


def _date(value: Any) -> float:
    try:
        date = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
    except ValueError:
        return float("nan")
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
