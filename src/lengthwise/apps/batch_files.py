"""OpenAI's batch files: requests in, as an application of one call an address; answers and errors out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lengthwise.apps._fields import require_one_answer
from lengthwise.apps.app import CHAT, COMPLETION, App, Call, From, Model, Sampling, Told, each
from lengthwise.apps.inputs import Row, Rows, read_rows
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.files import write_whole
from lengthwise.schema.tokens import estimated_tokens

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
        told=Told(prompt_tokens="prompt_tokens", max_tokens="max_tokens"),
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


def write_batch(
    outputs: Path, dead: Path, answers: Path, errors: Path, *, created_s: int = 0
) -> tuple[int, int]:
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
    return {
        "id": f"batch_req_{_id(line)}",
        "custom_id": line["id"],
        "response": response,
        "error": None,
    }


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
