"""Outputs of a running server, kept with their prompts, to learn lengths from."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lengthwise.schema.errors import InputError, OutputError

_RETRY_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible server and how it is asked.

    Attributes:
        url: Its address, up to and with ``/v1``.
        model: The model's name there.
        max_tokens: Limit of an output; None: the server's own. What reaches it is censored.
        temperature: None: the server's own.
        api_key: Sent as a bearer token; None: none.
        timeout_s: Of one request.
        retries: Further tries where the server is busy or gone.
    """

    url: str
    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0
    retries: int = 4

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise InputError(f"the address of a server must begin with http:// or https://; it is {self.url!r}")


@dataclass(frozen=True)
class Collected:
    """How many prompts were answered now, had been before, and failed (with the first reason)."""

    done: int
    skipped: int
    failed: int
    reason: str = ""


def collect(
    prompts: Iterable[str],
    out: Path | str,
    endpoint: Endpoint,
    *,
    concurrency: int = 8,
    pause: Callable[[float], None] = time.sleep,
    report: Callable[[int], None] = lambda _: None,
) -> Collected:
    """Asks a server for the completion of each prompt and appends them to a JSONL file as they come.

    What the file holds already for this model is not asked again, so that an interrupted collection goes on
    where it stopped; a last line that was cut off is dropped.

    Args:
        prompts: Each once; repeated ones are asked once.
        out: The file; ``predict.read`` reads it.
        endpoint: Whom to ask.
        concurrency: Requests at a time.
        pause: Waits so many seconds before a further try.
        report: Called with the number of answers so far.

    Raises:
        InputError: Concurrency is below 1.
        OutputError: The file cannot be written, or is none of ours.
    """
    if concurrency < 1:
        raise InputError(f"at least one request must be under way at a time; concurrency is {concurrency}")
    path = Path(out)
    had = _had(path, endpoint.model)
    wanted = list(dict.fromkeys(prompts))
    todo = [prompt for prompt in wanted if prompt not in had]
    done, reasons = 0, list[str]()
    try:
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; choose another place") from error
    with file, ThreadPoolExecutor(concurrency) as pool:
        for row in _answers(pool, todo, endpoint, concurrency, pause):
            if isinstance(row, str):
                reasons.append(row)
            else:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()
                done += 1
                report(done)
    return Collected(done, len(wanted) - len(todo), len(reasons), reasons[0] if reasons else "")


def _answers(
    pool: ThreadPoolExecutor,
    prompts: Sequence[str],
    endpoint: Endpoint,
    concurrency: int,
    pause: Callable[[float], None],
) -> Iterable[dict[str, Any] | str]:
    """Rows, or reasons of failures, as they come; so many prompts are under way as may be."""
    waiting = iter(prompts)
    running: set[Future[dict[str, Any] | str]] = set()
    while True:
        for prompt in waiting:
            running.add(pool.submit(_submit, prompt, endpoint, pause))
            if len(running) >= concurrency:
                break
        if not running:
            return
        ended, running = wait(running, return_when=FIRST_COMPLETED)
        for one in ended:
            yield one.result()


def _submit(prompt: str, endpoint: Endpoint, pause: Callable[[float], None]) -> dict[str, Any] | str:
    body: dict[str, Any] = {"model": endpoint.model, "messages": [{"role": "user", "content": prompt}]}
    if endpoint.max_tokens is not None:
        body["max_tokens"] = endpoint.max_tokens
    if endpoint.temperature is not None:
        body["temperature"] = endpoint.temperature
    for attempt in range(endpoint.retries + 1):
        try:
            return _row(prompt, _post(endpoint, body), endpoint.model)
        except urllib.error.HTTPError as error:
            reason = f"HTTP {error.code}: {error.read(200).decode('utf-8', 'replace')}"
            if error.code not in _RETRY_STATUSES:
                return reason
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
        if attempt < endpoint.retries:
            pause(min(2.0**attempt, _LONGEST_PAUSE_S))
    return reason


def _post(endpoint: Endpoint, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    if endpoint.api_key:
        headers["Authorization"] = f"Bearer {endpoint.api_key}"
    request = urllib.request.Request(  # noqa: S310 - the scheme was checked
        f"{endpoint.url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=endpoint.timeout_s) as answer:  # noqa: S310
        return json.load(answer)


def _row(prompt: str, answer: Any, model: str) -> dict[str, Any]:
    choice, usage = answer["choices"][0], answer.get("usage") or {}
    return {
        "model": model,
        "prompt": prompt,
        "output": choice["message"].get("content") or "",
        "output_tokens": usage.get("completion_tokens"),
        "prompt_tokens": usage.get("prompt_tokens"),
        "finish_reason": choice.get("finish_reason"),
    }


def _had(path: Path, model: str) -> set[str]:
    """Prompts that the file has answers to; a cut-off last line is removed from it."""
    if not path.exists():
        return set()
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    try:
        rows = [json.loads(line) for line in whole.splitlines() if line.strip()]
        had = {row["prompt"] for row in rows if row["model"] == model}
    except (ValueError, KeyError, TypeError) as error:
        raise OutputError(f"{path} must be new, or hold what was collected before; it does not: {error!r}") from error
    if len(whole) < len(data):
        path.write_bytes(whole)
    return had
