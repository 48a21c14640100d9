"""The rows that an application works on: JSONL, CSV and Parquet, each row a mapping of fields."""

from __future__ import annotations

import csv
import hashlib
import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, overload

from lengthwise.apps.app import CHAT, COMPLETION, App, Call, From, Model, Report, Sampling, each, require_one_answer
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.files import write_whole
from lengthwise.schema.workload import estimated_tokens

_FRAME_PAGE_ROWS = 20_000
Row = Mapping[str, Any]


class Numbered(Sequence[str]):
    """The texts of 0 .. n-1, none of them held."""

    def __init__(self, n: int) -> None:
        self._numbers = range(n)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> list[str]: ...
    def __getitem__(self, at: int | slice) -> str | list[str]:
        """One, or some."""
        return [str(i) for i in self._numbers[at]] if isinstance(at, slice) else str(self._numbers[at])


class Table(Sequence[Row]):
    """Rows of a polars frame."""

    def __init__(self, frame: Any) -> None:
        self._frame = frame

    def __len__(self) -> int:
        return int(self._frame.height)

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> list[Row]: ...
    def __getitem__(self, at: int | slice) -> Row | list[Row]:
        """One row, or some."""
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        row: Row = self._frame.row(range(len(self))[at], named=True)
        return row

    def __iter__(self) -> Iterator[Row]:
        return iter(self._frame.iter_rows(named=True, buffer_size=_FRAME_PAGE_ROWS))


class First(Sequence[Row]):
    """The first so many of some rows."""

    def __init__(self, rows: Sequence[Row], count: int) -> None:
        self._rows, self._numbers = rows, range(count)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> list[Row]: ...
    def __getitem__(self, at: int | slice) -> Row | list[Row]:
        """One row, or some."""
        found = self._numbers[at]
        return [self._rows[i] for i in found] if isinstance(found, range) else self._rows[found]

    def __iter__(self) -> Iterator[Row]:
        return islice(iter(self._rows), len(self))


FORMS = (".jsonl", ".csv", ".parquet")
_READ_PAGE_ROWS = 20_000
_INTEGERS = r"^(0|-?[1-9][0-9]{0,17})$"


@dataclass(frozen=True, eq=False)
class Rows:
    """What an application is run on.

    Attributes:
        ids: What tells rows apart: a field's values, or their numbers from 0.
        rows: Their fields.
        source: The file.
        sha256: Of its bytes, in hex; of some of its rows, also of how many.
    """

    ids: Sequence[str]
    rows: Sequence[Row]
    source: str = ""
    sha256: str = ""

    def __len__(self) -> int:
        return len(self.rows)

    def first(self, count: int) -> Rows:
        """The first so many of them, or all where there are no more."""
        if count >= len(self):
            return self
        digest = hashlib.sha256(f"the first {count} of {self.sha256}".encode()).hexdigest()
        return Rows(self.ids[:count], First(self.rows, count), self.source, digest)


def read_rows(path: Path | str, id_field: str | None = None, check: Callable[[Row], None] | None = None) -> Rows:
    """The rows of a file, all looked at once; JSONL stays on disk and is read again where it is needed.

    Of CSV, columns of whole numbers are numbers and all else is text as it stands, an empty one none.

    Args:
        path: A .jsonl, .csv or .parquet file.
        id_field: The field that tells rows apart: texts or whole numbers, each once. None: they are numbered.
        check: Raises InputError where a row is no good.

    Raises:
        InputError: The file cannot be read, or a row is none; with its line.
    """
    path = Path(path).expanduser()
    suffix = path.suffix.lower()
    if suffix not in FORMS:
        raise InputError(f"inputs must be a file that ends in {', '.join(FORMS)}; {path} came")
    if not path.is_file():
        raise InputError(f"there is no file of inputs {path}; name one that ends in {', '.join(FORMS)}")
    try:
        told = _Ids(str(path), id_field, check)
        rows = {".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet}[suffix](path, told)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    if not len(rows):
        raise InputError(f"{path} must have at least one row; it has none")
    return Rows(told.ids if id_field else Numbered(len(rows)), rows, str(path), digest)


@dataclass
class _Ids:
    """Collects what tells rows apart, and refuses what does not."""

    source: str
    name: str | None
    check: Callable[[Row], None] | None = None
    ids: list[str] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)

    @property
    def scans(self) -> bool:
        """Whether rows are looked at."""
        return self.name is not None or self.check is not None

    def add(self, row: Row, line: int) -> None:
        try:
            if self.check is not None:
                self.check(row)
        except InputError as error:
            raise InputError(f"{self.source}, line {line}: {error}") from None
        if self.name is not None:
            self._tell(row, line, self.name)

    def _tell(self, row: Row, line: int, name: str) -> None:
        if name not in row:
            problem = UnknownNameError("field for the id", name, row)
            raise InputError(f"{self.source}, line {line}: {problem}")
        value = row[name]
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            raise InputError(
                f"{self.source}, line {line}: an id must be a text or a whole number; "
                f"{name} is {value!r}. Take another field, or none to number rows"
            )
        text = str(value)
        first = self.seen.setdefault(text, line)
        if first != line:
            raise InputError(
                f"{self.source}, line {line}: every id must be there once; {text!r} is also in line {first}"
            )
        self.ids.append(text)


class Lines(Sequence[Row]):
    """Rows of a JSONL file that stay there, found by where their lines begin."""

    def __init__(self, path: Path, starts: array[int]) -> None:
        self._path, self._starts = path, starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> list[Row]: ...
    def __getitem__(self, at: int | slice) -> Row | list[Row]:
        """One row, or some."""
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        at = range(len(self))[at]
        with self._path.open("rb") as file:
            file.seek(self._starts[at])
            return self._row(file.read(self._starts[at + 1] - self._starts[at]))

    def __iter__(self) -> Iterator[Row]:
        with self._path.open("rb") as file:
            for text in file:
                if text.strip():
                    yield self._row(text)

    def _row(self, text: bytes) -> Row:
        try:
            row = json.loads(text)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise InputError(f"{self._path} must stay as it is while it is worked on; it has changed")
        return row


def _jsonl(path: Path, ids: _Ids) -> Lines:
    starts, at = array("q"), 0
    with path.open("rb") as file:
        for line, text in enumerate(file, 1):
            if text.strip():
                ids.add(_object(text, path, line), line)
                starts.append(at)
            at += len(text)
    starts.append(at)
    return Lines(path, starts)


def _object(text: bytes, path: Path, line: int) -> Row:
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


def _csv(path: Path, ids: _Ids) -> Table:
    import polars as pl

    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            names = _header(path, next(reader, []))
            schema = dict.fromkeys(names, pl.String)
            values = _checked(path, reader, names, ids)
            pages = [
                pl.DataFrame(page, schema=schema, orient="row")
                for page in iter(lambda: list(islice(values, _READ_PAGE_ROWS)), [])
            ]
        except csv.Error as error:
            raise InputError(f"{path}, line {reader.line_num}: must be CSV; {error}") from None
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: must be UTF-8 text; {error.reason} at byte {error.start}") from None
    frame = pl.concat(pages) if pages else pl.DataFrame(schema=schema)
    whole = [name for name in names if _is_whole(frame[name])]
    return Table(frame.with_columns(pl.col(name).cast(pl.Int64) for name in whole))


def _header(path: Path, names: list[str]) -> list[str]:
    twice = sorted({name for name in names if names.count(name) > 1})
    if not names or twice or not all(names):
        raise InputError(
            f"{path}, line 1: must be a header that names every column once; it is {','.join(names) or 'empty'!r}"
        )
    return names


def _checked(path: Path, reader: Any, names: list[str], ids: _Ids) -> Iterator[list[str | None]]:
    """Rows with as many values as there are columns; empty lines are left out."""
    for values in reader:
        if not values:
            continue
        if len(values) != len(names):
            raise InputError(
                f"{path}, line {reader.line_num}: must have {len(names)} values as the header does; it has "
                f'{len(values)}. Put texts with commas between "..."'
            )
        if ids.scans:
            ids.add(dict(zip(names, values, strict=True)), reader.line_num)
        yield [value or None for value in values]


def _is_whole(column: Any) -> bool:
    """Whether all of it are whole numbers as Python writes them, so that none loses zeros that it begins with."""
    there = column.drop_nulls()
    return bool(len(there)) and bool(there.str.contains(_INTEGERS).all())


def _parquet(path: Path, ids: _Ids) -> Table:
    import polars as pl
    from polars.exceptions import PolarsError

    try:
        frame = pl.read_parquet(path)
    except PolarsError as error:
        raise InputError(f"{path} must be Parquet; {str(error).splitlines()[0]}") from None
    if ids.scans:
        for line, row in enumerate(frame.iter_rows(named=True, buffer_size=_READ_PAGE_ROWS), 1):
            ids.add(row, line)
    return Table(frame)


URLS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}
UNLIMITED_TOKENS = 2**24
"""Tokens of an output without a limit: more than any model's context."""
_COMPLETION_TOKENS = 16
"""What the completions API takes where max_tokens is not said."""


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch file as an application.

    Attributes:
        app: One call for each address, which passes the requests on.
        rows: The requests by their custom_id.
    """

    app: App
    rows: Rows


def read_batch(path: Path | str, models: Sequence[Model] = (), name: str = "") -> Batch:
    """The application that asks what a batch file asks, each request as it stands there.

    Args:
        path: JSONL with custom_id, method, url and body in each line.
        models: What is known of models by their names there; of others the name is all.
        name: Of the application.

    Raises:
        InputError: A line is no request, or asks what cannot be kept; with file and line.
    """
    named: set[str] = set()
    used: set[str] = set()

    def look(line: Row) -> None:
        _check(line)
        named.add(line["body"]["model"])
        used.add(URLS[line["url"]])

    read = read_rows(path, "custom_id", look)
    known = {model.name: model for model in models}
    if lacking := sorted(set(known) - named):
        raise UnknownNameError(f"model in {read.source}", lacking[0], named)
    app = App(
        models=[known.get(one, Model(one)) for one in sorted(named)],
        calls=[_call(api) for api in (CHAT, COMPLETION) if api in used],
        name=name,
    )
    return Batch(app, Rows(read.ids, _Requests(read.rows), read.source, read.sha256))


def is_batch(app: App) -> bool:
    """Whether an application is one that ``read_batch`` made."""
    return all(call.name in URLS.values() and call == _call(call.name) for call in app.calls)


def _call(api: str) -> Call:
    """Passes a row's requests of one address on: it has one of them, or none."""
    return Call(
        name=api,
        model=From("model"),
        prompt="",
        api=api,
        fan=each(f"{api}_requests"),
        body="item",
        sampling=Sampling(temperature=1.0),
        report=Report(prompt_tokens="prompt_tokens", max_tokens="max_tokens"),
    )


class _Requests(Sequence[Row]):
    """Rows of a batch file, as the calls take them."""

    def __init__(self, lines: Sequence[Row]) -> None:
        self._lines = lines

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        return _row(self._lines[at])

    def __iter__(self) -> Iterator[Row]:
        return (_row(line) for line in self._lines)


def _check(line: Row) -> None:
    """Nothing, where a line is a request whose answer can be kept; raises InputError."""
    if line.get("method") != "POST":
        raise InputError(f"method must be POST; it is {line.get('method')!r}")
    if line.get("url") not in URLS:
        raise UnknownNameError("url of a batch", str(line.get("url")), URLS)
    body = line.get("body")
    if not isinstance(body, dict):
        raise InputError(f"body must be a table of a request's fields; it is {type(body).__name__}")
    if not isinstance(body.get("model"), str) or not body["model"]:
        raise InputError(f"body.model must name a model; it is {body.get('model')!r}")
    _check_prompt(body, URLS[line["url"]])
    _check_fields(body)


def _check_fields(body: Mapping[str, Any]) -> None:
    require_one_answer(body, "body")
    for name in ("max_tokens", "max_completion_tokens"):
        most = body.get(name)
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise InputError(f"body.{name} must be whole tokens of at least 1; it is {most!r}")


def _check_prompt(body: Mapping[str, Any], api: str) -> None:
    if api == COMPLETION:
        if not isinstance(body.get("prompt"), str):
            raise InputError("body.prompt must be one text; make one request of each where there are several")
        return
    messages = body.get("messages")
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in messages)
    ):
        raise InputError('body.messages must be a list of {"role": ..., "content": ...}')


def _row(line: Row) -> Row:
    body, api = line["body"], URLS[line["url"]]
    otherwise = _COMPLETION_TOKENS if api == COMPLETION else UNLIMITED_TOKENS
    return {
        "custom_id": line["custom_id"],
        "model": body["model"],
        "chat_requests": [body] if api == CHAT else [],
        "completion_requests": [body] if api == COMPLETION else [],
        "prompt_tokens": max(1, _prompt_tokens(body)),
        "max_tokens": body.get("max_completion_tokens") or body.get("max_tokens") or otherwise,
    }


def _prompt_tokens(body: Mapping[str, Any]) -> int:
    if "messages" not in body:
        return estimated_tokens(body["prompt"])
    return sum(estimated_tokens(text) for one in body["messages"] for text in _texts(one.get("content")))


def _texts(content: Any) -> Iterator[str]:
    """Those of a message: a text, or a list of parts of which some have one."""
    if isinstance(content, str):
        yield content
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            yield part["text"]


def write_batch(outputs: Path, dead: Path, answers: Path, errors: Path, *, created_s: int = 0) -> tuple[int, int]:
    """Writes a run's exports as OpenAI's batch output, in the order of the requests; lines of both files.

    Args:
        outputs: JSONL that ``run.export`` wrote of answers.
        dead: JSONL that it wrote of those without; not there where all were answered.
        answers: Where answers go.
        errors: Where requests without an answer go.
        created_s: When it was, since 1970, for the field of that name.
    """
    counts = []
    for source, target, of in ((outputs, answers, _answer), (dead, errors, _error)):
        lines = [0]

        def write(path: Path, source: Path = source, of: Any = of, lines: list[int] = lines) -> None:
            with path.open("w", encoding="utf-8", newline="\n") as to:
                for line in _lines(source) if of is _answer or source.exists() else ():
                    to.write(json.dumps(of(line, created_s), ensure_ascii=False) + "\n")
                    lines[0] += 1

        write_whole(target, write)
        counts.append(lines[0])
    return counts[0], counts[1]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def _answer(line: Mapping[str, Any], created_s: int) -> dict[str, Any]:
    is_chat = line["call"] == CHAT
    said = {"message": {"role": "assistant", "content": line["text"]}} if is_chat else {"text": line["text"]}
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{_id(line)}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created_s,
        "model": line["model"],
        "choices": [{"index": 0, **said, "logprobs": None, "finish_reason": line["finish_reason"]}],
        "usage": {
            "prompt_tokens": line["prompt_tokens"],
            "completion_tokens": line["output_tokens"],
            "total_tokens": line["prompt_tokens"] + line["output_tokens"],
        },
    }
    response = {"status_code": 200, "request_id": f"req_{_id(line)}", "body": body}
    return {"id": f"batch_req_{_id(line)}", "custom_id": line["id"], "response": response, "error": None}


def _error(line: Mapping[str, Any], created_s: int) -> dict[str, Any]:  # noqa: ARG001 - as _answer
    return {
        "id": f"batch_req_{_id(line)}",
        "custom_id": line["id"],
        "response": None,
        "error": {"code": line["state"], "message": line["error"] or "it was never asked"},
    }


def _id(line: Mapping[str, Any]) -> str:
    """The same for the same request."""
    return hashlib.sha256(line["id"].encode("utf-8", "surrogatepass")).hexdigest()[:24]
