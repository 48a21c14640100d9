"""Reads rows of applications from JSONL, CSV and Parquet files, and reads and writes files of OpenAI's batch API."""

from __future__ import annotations

import csv
import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, overload

from lengthwise.apps.app import CHAT, COMPLETION, App, Call, From, LengthFields, Model, Sampling, each, require_one_text
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.files import write_atomic
from lengthwise.schema.workload import estimated_tokens

Row = Mapping[str, Any]
_T = TypeVar("_T")
_PAGE_ROWS = 20_000
_FORMS = (".jsonl", ".csv", ".parquet")
# Without leading zeros, which a number loses, and within 64 bits.
_INTEGERS = r"^(0|-?[1-9][0-9]{0,17})$"


class _Lazy(Sequence[_T]):
    """A sequence that computes each element by ``item(i)``. ``items`` yields all elements, faster than one by one."""

    def __init__(self, length: int, item: Callable[[int], _T], items: Callable[[], Iterable[_T]] | None = None) -> None:
        self._numbers, self._item, self._items = range(length), item, items

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, at: int) -> _T: ...
    @overload
    def __getitem__(self, at: slice) -> list[_T]: ...
    def __getitem__(self, at: int | slice) -> _T | list[_T]:
        numbers = self._numbers[at]
        return self._item(numbers) if isinstance(numbers, int) else [self._item(i) for i in numbers]

    def __iter__(self) -> Iterator[_T]:
        return iter(map(self._item, self._numbers) if self._items is None else self._items())


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows that an application runs on."""

    ids: Sequence[str]  # text that identifies each row: the value of its id field, or its number from 0
    rows: Sequence[Row]
    source: str = ""  # path of the file
    sha256: str = ""  # SHA-256 of the file in hex; ``first`` derives another one from it and the number of rows

    def __len__(self) -> int:
        return len(self.rows)

    def first(self, count: int) -> Rows:
        """Return the first ``count`` rows, or all rows if there are fewer."""
        if count >= len(self):
            return self
        rows = self.rows
        digest = hashlib.sha256(f"the first {count} of {self.sha256}".encode()).hexdigest()
        first = _Lazy(count, lambda i: rows[i], lambda: islice(iter(rows), count))
        return Rows(self.ids[:count], first, self.source, digest)


def read_rows(path: Path | str, id_field: str | None = None, check: Callable[[Row], None] | None = None) -> Rows:
    """Return the rows of a JSONL, CSV or Parquet file. Rows of JSONL stay on disk and are read on access.

    A CSV column of whole numbers (up to 18 digits, no leading zeros) becomes integers, and any other column becomes
    texts. Empty values of CSV become None.

    Args:
        id_field: Field whose unique texts or whole numbers identify the rows; None numbers the rows.
        check: Function that receives each row (of CSV with texts only), and raises InputError if the row is invalid.

    Raises:
        InputError: The file cannot be read, or a row is invalid; then the message names the line.
    """
    path = Path(path).expanduser()
    suffix = path.suffix.lower()
    if suffix not in _FORMS:
        raise InputError(f"inputs must be a file that ends in {', '.join(_FORMS)}; it is {path}")
    if not path.is_file():
        raise InputError(f"there is no file of inputs {path}; name one that ends in {', '.join(_FORMS)}")
    lines: dict[str, int] = {}

    def checked(row: Row, line: int) -> None:
        try:
            if check is not None:
                check(row)
            if id_field is not None:
                _add_id(lines, row, line, id_field)
        except InputError as error:
            raise InputError(f"{path}, line {line}: {error}") from None

    try:
        rows = {".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet}[suffix](path, checked)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    if not len(rows):
        raise InputError(f"{path} must have at least one row; it has none")
    return Rows(list(lines) if id_field else _Lazy(len(rows), str), rows, str(path), digest)


def _add_id(lines: dict[str, int], row: Row, line: int, name: str) -> None:
    if name not in row:
        raise UnknownNameError("field for the id", name, row)
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise InputError(
            f"an id must be a text or a whole number; {name} is {value!r}. Name another field, or none to number rows"
        )
    if (first := lines.setdefault(str(value), line)) != line:
        raise InputError(f"every id must be unique; {str(value)!r} is also in line {first}")


Check = Callable[[Row, int], None]  # receives each row with its line, and raises InputError if it is invalid


def _jsonl(path: Path, check: Check) -> Sequence[Row]:
    starts, at = array("q"), 0
    with path.open("rb") as file:
        for line, text in enumerate(file, 1):
            if text.strip():
                check(_json_object(text, path, line), line)
                starts.append(at)
            at += len(text)
    starts.append(at)

    def parse(text: bytes) -> Row:
        try:
            row = json.loads(text)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise InputError(f"{path} must not change while it is in use; it has changed")
        return row

    def item(i: int) -> Row:
        with path.open("rb") as file:
            file.seek(starts[i])
            return parse(file.read(starts[i + 1] - starts[i]))

    def items() -> Iterator[Row]:
        with path.open("rb") as file:
            yield from (parse(text) for text in file if text.strip())

    return _Lazy(len(starts) - 1, item, items)


def _json_object(text: bytes, path: Path, line: int) -> Row:
    try:
        row = json.loads(text)
    except UnicodeDecodeError:
        raise InputError(f"{path}, line {line}: must be UTF-8 text; byte {text[:20]!r}... is not") from None
    except ValueError as error:
        raise InputError(f"{path}, line {line}: must be a JSON object; {error}") from None
    if not isinstance(row, dict):
        raise InputError(
            f'{path}, line {line}: must be a JSON object such as {{"question": "..."}}; it is a {type(row).__name__}'
        )
    return row


def _csv(path: Path, check: Check) -> Sequence[Row]:
    import polars as pl

    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            names = next(reader, [])
            if not names or len(set(names)) < len(names) or not all(names):
                raise InputError(
                    f"{path}, line 1: must be a header that names every column once; it is "
                    f"{','.join(names) or 'empty'!r}"
                )
            schema = dict.fromkeys(names, pl.String)
            values = _csv_values(path, reader, names, check)
            pages = [
                pl.DataFrame(page, schema=schema, orient="row")
                for page in iter(lambda: list(islice(values, _PAGE_ROWS)), [])
            ]
        except csv.Error as error:
            raise InputError(f"{path}, line {reader.line_num}: must be CSV; {error}") from None
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: must be UTF-8 text; {error.reason} at byte {error.start}") from None
    frame = pl.concat(pages) if pages else pl.DataFrame(schema=schema)
    columns = {name: frame[name].drop_nulls() for name in names}
    integers = [name for name, values in columns.items() if len(values) and values.str.contains(_INTEGERS).all()]
    return _frame_rows(frame.with_columns(pl.col(name).cast(pl.Int64) for name in integers))


def _csv_values(path: Path, reader: Any, names: list[str], check: Check) -> Iterator[list[str | None]]:
    for values in reader:
        if not values:
            continue
        if len(values) != len(names):
            raise InputError(
                f"{path}, line {reader.line_num}: must have {len(names)} values as the header does; it has "
                f'{len(values)}. Put texts with commas between "..."'
            )
        check(dict(zip(names, values, strict=True)), reader.line_num)
        yield [value or None for value in values]


def _parquet(path: Path, check: Check) -> Sequence[Row]:
    import polars as pl
    from polars.exceptions import PolarsError

    try:
        rows = _frame_rows(pl.read_parquet(path))
    except PolarsError as error:
        raise InputError(f"{path} must be Parquet; {str(error).splitlines()[0]}") from None
    for line, row in enumerate(rows, 1):
        check(row, line)
    return rows


def _frame_rows(frame: Any) -> Sequence[Row]:
    return _Lazy(
        frame.height, lambda i: frame.row(i, named=True), lambda: frame.iter_rows(named=True, buffer_size=_PAGE_ROWS)
    )


URLS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}
UNLIMITED_TOKENS = 2**24  # tokens of an output without a limit: more than any model's context
_COMPLETION_TOKENS = 16  # default max_tokens of the completions API


@dataclass(frozen=True, eq=False)
class Batch:
    """An OpenAI batch file as an application. Each request is a row, whose id is the request's custom_id."""

    app: App
    rows: Rows


def read_batch(path: Path | str, models: Sequence[Model] = (), name: str = "") -> Batch:
    """Return the application that sends the requests of a batch file.

    Each line of the JSONL file has custom_id, method, url and body. A request keeps its body, and gets a seed if it has
    none and its temperature is not 0. Models of the file that ``models`` lacks get the defaults of ``Model``. Raises
    InputError if a line is not a request, or its answer cannot be stored; the message names file and line. Or
    ``models`` has a model that the file does not use.
    """
    named: set[str] = set()
    used: set[str] = set()

    def check(line: Row) -> None:
        _check_request(line)
        named.add(line["body"]["model"])
        used.add(URLS[line["url"]])

    read = read_rows(path, "custom_id", check)
    known = {model.name: model for model in models}
    if unknown := sorted(set(known) - named):
        raise UnknownNameError(f"model in {read.source}", unknown[0], named)
    app = App(
        models=[known.get(one, Model(one)) for one in sorted(named)],
        calls=[_batch_call(api) for api in (CHAT, COMPLETION) if api in used],
        name=name,
    )
    lines = read.rows
    rows = _Lazy(len(lines), lambda i: _batch_row(lines[i]), lambda: map(_batch_row, lines))
    return Batch(app, Rows(read.ids, rows, read.source, read.sha256))


def is_batch(app: App) -> bool:
    """Return whether ``read_batch`` made the application."""
    return all(call.name in URLS.values() and call == _batch_call(call.name) for call in app.calls)


def _batch_call(api: str) -> Call:
    return Call(
        name=api,
        model=From("model"),
        prompt="",
        api=api,
        fan=each(f"{api}_requests"),
        body="item",
        sampling=Sampling(temperature=1.0),
        report=LengthFields(prompt_tokens="prompt_tokens", max_tokens="max_tokens"),
    )


def _check_request(line: Row) -> None:
    if line.get("method") != "POST":
        raise InputError(f"method must be POST; it is {line.get('method')!r}")
    if line.get("url") not in URLS:
        raise UnknownNameError("url of a batch", str(line.get("url")), URLS)
    body = line.get("body")
    if not isinstance(body, dict):
        raise InputError(f"body must be a table of a request's fields; it is {type(body).__name__}")
    if not isinstance(body.get("model"), str) or not body["model"]:
        raise InputError(f"body.model must name a model; it is {body.get('model')!r}")
    messages = body.get("messages")
    if URLS[line["url"]] == COMPLETION:
        if not isinstance(body.get("prompt"), str):
            raise InputError("body.prompt must be one text; split several prompts into several requests")
    elif (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in messages)
    ):
        raise InputError('body.messages must be a list of {"role": ..., "content": ...}')
    require_one_text(body, "body")
    for name in ("max_tokens", "max_completion_tokens"):
        tokens = body.get(name)
        if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1):
            raise InputError(f"body.{name} must be whole tokens of at least 1; it is {tokens!r}")


def _batch_row(line: Row) -> Row:
    body, api = line["body"], URLS[line["url"]]
    contents = [one.get("content") for one in body["messages"]] if "messages" in body else [body["prompt"]]
    tokens = sum(estimated_tokens(text) for content in contents for text in _texts(content))
    default = _COMPLETION_TOKENS if api == COMPLETION else UNLIMITED_TOKENS
    return {
        "custom_id": line["custom_id"],
        "model": body["model"],
        "chat_requests": [body] if api == CHAT else [],
        "completion_requests": [body] if api == COMPLETION else [],
        "prompt_tokens": max(1, tokens),
        "max_tokens": body.get("max_completion_tokens") or body.get("max_tokens") or default,
    }


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            yield part["text"]


def write_batch(outputs: Path, dead: Path, answers: Path, errors: Path, *, created_s: int = 0) -> tuple[int, int]:
    """Write the outputs of a run in the format of OpenAI's batch API. Return the numbers of answers and errors.

    ``outputs`` and ``dead`` are files that ``run.export`` wrote. ``dead`` may be absent. The lines of the new files
    ``answers`` and ``errors`` are in the order of the requests. ``created_s`` is the Unix time of the answers.
    """

    def answer(line: Mapping[str, Any]) -> dict[str, Any]:
        return {"response": _response(line, created_s), "error": None}

    def error(line: Mapping[str, Any]) -> dict[str, Any]:
        message = line["error"] or "the request was never sent"
        return {"response": None, "error": {"code": line["state"], "message": message}}

    def converted(source: Path, result: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Iterator[dict[str, Any]]:
        if source.exists():
            with source.open(encoding="utf-8") as lines:
                for line in map(json.loads, lines):
                    yield {"id": f"batch_req_{_request_id(line)}", "custom_id": line["id"], **result(line)}

    return write_lines(answers, converted(outputs, answer)), write_lines(errors, converted(dead, error))


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    """Write rows as JSON lines, and return their number. If this fails, an existing file stays unchanged."""
    lines = 0

    def write(path: Path) -> None:
        nonlocal lines
        with path.open("w", encoding="utf-8", newline="\n") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                lines += 1

    write_atomic(path, write)
    return lines


def _response(line: Mapping[str, Any], created_s: int) -> dict[str, Any]:
    is_chat, number = line["call"] == CHAT, _request_id(line)
    text = {"message": {"role": "assistant", "content": line["text"]}} if is_chat else {"text": line["text"]}
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{number}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created_s,
        "model": line["model"],
        "choices": [{"index": 0, **text, "logprobs": None, "finish_reason": line["finish_reason"]}],
        "usage": {
            "prompt_tokens": line["prompt_tokens"],
            "completion_tokens": line["output_tokens"],
            "total_tokens": line["prompt_tokens"] + line["output_tokens"],
        },
    }
    return {"status_code": 200, "request_id": f"req_{number}", "body": body}


def _request_id(line: Mapping[str, Any]) -> str:
    return hashlib.sha256(line["id"].encode("utf-8", "surrogatepass")).hexdigest()[:24]
