"""Result files of other load generators and engines become Measured; the format is told by the content."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from lengthwise.measure.foreign import _aiperf, _engine_log, _guidellm, _vllm
from lengthwise.measure.foreign._rows import Story, measured_of
from lengthwise.schema.errors import InputError
from lengthwise.schema.measured import Measured

FORMATS = {
    "vllm": "vllm bench serve --save-result --save-detailed, one JSON object",
    "guidellm": "GuideLLM's benchmarks.json",
    "aiperf": "AIPerf's profile_export.jsonl",
    "llmservingsim": "JSON lines of queued_ts, scheduled_ts, first_token_ts, last_token_ts",
}
"""What ``read_foreign`` reads."""


def read_foreign(path: Path | str, *, benchmark: int | None = None) -> Measured:
    """What another program measured, in the records of a simulation; packed with gzip or not.

    What its format does not tell (when requests were due, times between single tokens) is among the doubts.

    Args:
        path: The file.
        benchmark: Which of several in a GuideLLM report, from 0.

    Raises:
        InputError: The file is missing, cut off, of no known format, or lacks what is needed.
    """
    path = Path(path)
    text = _text(path)
    try:
        story = _story(text, benchmark)
        name = path.name.removesuffix(".gz").rpartition(".")[0] or path.name
        return measured_of(story, name)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{path}: a request lacks a value, or has one that cannot be used: {error!r}"
        ) from error


def _story(text: str, benchmark: int | None) -> Story:
    try:
        body = json.loads(text)
    except ValueError:
        return _of_lines(_lines(text))
    if _vllm.fits(body):
        return _vllm.story_of(body)
    if _guidellm.fits(body):
        return _guidellm.story_of(body, benchmark)
    return _of_lines([body])


def _of_lines(lines: list[Any]) -> Story:
    if lines and _aiperf.fits(lines[0]):
        return _aiperf.story_of(lines)
    if lines and _engine_log.fits(lines[0]):
        return _engine_log.story_of(lines)
    if lines and _vllm.fits(lines[0]):
        raise InputError(
            f"it holds {len(lines)} results of vllm bench serve (--append-result); give a file each"
        )
    known = "; ".join(f"{name}: {words}" for name, words in FORMATS.items())
    raise InputError(f"results must be of a known format; these are not. Known are {known}")


def _lines(text: str) -> list[Any]:
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                lines.append(json.loads(line))
            except ValueError as error:
                raise InputError(
                    f"line {number} must be JSON; it is cut off or something else: {error}"
                ) from error
    return lines


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")
    except FileNotFoundError:
        raise InputError(f"there is no file of results {path}") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"{path} must be a whole text file, packed with gzip or not; {error}") from error
