"""Collect outputs of a running server with their prompts, as training data for length predictors."""

from __future__ import annotations

import itertools
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lengthwise.schema.errors import InputError, OutputError

_RETRY_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_MAX_PAUSE_S = 30.0


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible server, and the settings of requests to it."""

    url: str  # up to and with ``/v1``
    model: str
    max_tokens: int | None = None  # limit of an output, at which it is censored; None: the server's default
    temperature: float | None = None  # None: the server's default
    api_key: str | None = field(default=None, repr=False)  # sent as a bearer token
    timeout_s: float = 600.0  # longest wait for bytes of an answer
    retries: int = 4  # further attempts after an attempt that failed, unless the server refuses the request itself

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise InputError(f"the address of a server must begin with http:// or https://; it is {self.url!r}")


@dataclass(frozen=True)
class Collected:
    """Numbers of prompts: answered now, in the file before (``skipped``), and failed, with the first ``reason``."""

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
    """Append the server's outputs of all prompts to a JSONL file as they arrive.

    Equal prompts are sent once. Prompts whose output from this model is in the file are skipped, so that an interrupted
    collection continues. An incomplete last line is removed. ``predict.read`` reads the file. ``pause`` sleeps before a
    retry. ``report`` is called with the number of outputs so far. Raises InputError for a concurrency below 1, and
    OutputError if the file cannot be written or does not come from a collection.
    """
    if concurrency < 1:
        raise InputError(f"concurrency must be at least 1; it is {concurrency}")
    path = Path(out)
    known = _known_prompts(path, endpoint.model)
    unique = list(dict.fromkeys(prompts))
    new = [prompt for prompt in unique if prompt not in known]
    done, reasons = 0, list[str]()
    try:
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; choose another place") from error
    with file, ThreadPoolExecutor(concurrency) as pool:
        waiting = iter(new)
        running: set[Future[dict[str, Any] | str]] = set()
        while True:
            # Prompts are submitted as others finish, so that after an exception the pool has few requests to wait for.
            for prompt in itertools.islice(waiting, concurrency - len(running)):
                running.add(pool.submit(_submit, prompt, endpoint, pause))
            if not running:
                break
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for request in finished:
                row = request.result()
                if isinstance(row, str):
                    reasons.append(row)
                    continue
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()
                done += 1
                report(done)
    return Collected(done, len(unique) - len(new), len(reasons), reasons[0] if reasons else "")


def _submit(prompt: str, endpoint: Endpoint, pause: Callable[[float], None]) -> dict[str, Any] | str:
    body: dict[str, Any] = {"model": endpoint.model, "messages": [{"role": "user", "content": prompt}]}
    limits = {"max_tokens": endpoint.max_tokens, "temperature": endpoint.temperature}
    body |= {name: value for name, value in limits.items() if value is not None}
    headers = {"Content-Type": "application/json"}
    if endpoint.api_key:
        headers["Authorization"] = f"Bearer {endpoint.api_key}"
    request = urllib.request.Request(  # noqa: S310 - the scheme was checked
        f"{endpoint.url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers
    )
    for attempt in range(endpoint.retries + 1):
        try:
            with urllib.request.urlopen(request, timeout=endpoint.timeout_s) as response:  # noqa: S310
                answer = json.load(response)
            choice, usage = answer["choices"][0], answer.get("usage") or {}
            return {
                "model": endpoint.model,
                "prompt": prompt,
                "output": choice["message"].get("content") or "",
                "output_tokens": usage.get("completion_tokens"),
                "prompt_tokens": usage.get("prompt_tokens"),
                "finish_reason": choice.get("finish_reason"),
            }
        except urllib.error.HTTPError as error:
            reason = f"HTTP {error.code}: {error.read(200).decode('utf-8', 'replace')}"
            if error.code not in _RETRY_STATUSES:
                return reason
        except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
        if attempt < endpoint.retries:
            pause(min(2.0**attempt, _MAX_PAUSE_S))
    return reason


def _known_prompts(path: Path, model: str) -> set[str]:
    """Return the prompts whose outputs the file has, and remove an incomplete last line from the file."""
    if not path.exists():
        return set()
    data = path.read_bytes()
    complete = data[: data.rfind(b"\n") + 1]
    try:
        rows = [json.loads(line) for line in complete.splitlines() if line.strip()]
        known = {row["prompt"] for row in rows if row["model"] == model}
    except (ValueError, KeyError, TypeError) as error:
        raise OutputError(
            f"{path} must be new or the file of an earlier collection; it is neither: {error!r}"
        ) from error
    if len(complete) < len(data):
        path.write_bytes(complete)
    return known
