"""Reads requests and service times that a command names: traces, presets, files of numbers, distributions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.workload import Workload

if TYPE_CHECKING:
    from lengthwise.theory import ServiceTimes

PRESET_REQUESTS = 20_000

Floats = npt.NDArray[np.float64]


def open_workload(
    source: str, format_: str | Mapping[str, str] | None = None, num_requests: int = PRESET_REQUESTS, seed: int = 0
) -> Workload:
    """Return the requests of the trace file ``source``, or ``num_requests`` requests of the preset of that name."""
    from lengthwise import workload
    from lengthwise.config.workload import read_trace

    path = Path(source).expanduser()
    if path.exists() or format_ is not None or path.suffix:
        return read_trace(path, format_)
    try:
        return workload.preset(source).generate(num_requests, seed=seed)
    except UnknownNameError as error:
        raise InputError(f"there is no file {source}, and {error}") from None


def service_times(
    uniform: tuple[float, float] | None, exponential: float | None, lengths: str | None, token_s: float, fixed_s: float
) -> tuple[ServiceTimes, list[str]]:
    """Return the service times that exactly one of the first three arguments gives, and their description.

    ``uniform`` is (lowest, highest) in seconds, ``exponential`` a rate in 1/s. ``lengths`` names a trace, a preset or a
    .txt file of output tokens; a request then takes ``fixed_s`` plus ``token_s`` for each token.
    """
    from lengthwise import theory

    options = {"--uniform": uniform, "--exponential": exponential, "--lengths": lengths}
    given = [name for name, value in options.items() if value is not None]
    if len(given) != 1:
        ways, found = "--uniform LOW HIGH, --exponential RATE, --lengths FILE", " and ".join(given) or "none of them"
        raise InputError(f"service times come from one of {ways}; given: {found}")
    if uniform is not None:
        return theory.UniformTimes(*uniform), [f"service uniform, {uniform[0]:g} to {uniform[1]:g} s"]
    if exponential is not None:
        times = theory.ExponentialTimes(exponential)
        return times, [f"service exponential, mean {times.mean_s:.3g} s"]
    source = str(lengths)
    if Path(source).suffix == ".txt":
        tokens = _read_numbers(Path(source)).ravel()
        if not (np.isfinite(tokens).all() and (tokens > 0).all()):
            raise InputError(f"{source} must have finite lengths above 0, one a line")
    else:
        tokens = np.asarray(open_workload(source).output_tokens, float)
    text = f"{len(tokens):,} lengths of {source}, mean {tokens.mean():.4g} tokens"
    return theory.SampledTimes(_seconds(tokens, token_s, fixed_s)), [text, f"{token_s:g} s a token"]


def predicted_times(path: Path, token_s: float, fixed_s: float) -> tuple[Floats, Floats]:
    """Read true and predicted tokens, two columns of a file, and return both as service times in seconds."""
    table = _read_numbers(path)
    if table.shape[1] != 2:
        raise InputError(f"{path} must have true and predicted tokens, two numbers a line; it has {table.shape[1]}")
    if not (np.isfinite(table).all() and (table[:, 0] > 0).all() and (table[:, 1] >= 0).all()):
        raise InputError(f"{path} must have finite tokens, true ones above 0 and predicted ones at least 0")
    true, predicted = _seconds(table, token_s, fixed_s).T
    return true, predicted


def _read_numbers(path: Path) -> Floats:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} must have numbers, the same count in each line: {error}") from None
    rows: list[list[float]] = []
    for number, line in enumerate(lines, 1):
        if not (words := line.replace(",", " ").split()):
            continue
        try:
            rows.append(list(map(float, words)))
        except ValueError:
            raise InputError(f"{path} must have numbers; line {number} is {' '.join(words)!r}") from None
        if len(words) != len(rows[0]):
            counts = f"{len(rows[0])} as in its first; line {number} has {len(words)}: {line.strip()!r}"
            raise InputError(f"{path} must have the same count of numbers in each line, {counts}")
    if not rows:
        raise InputError(f"{path} has no numbers; write one request a line")
    return np.array(rows)


def _seconds(tokens: Floats, token_s: float, fixed_s: float) -> Floats:
    if not (math.isfinite(token_s) and token_s > 0 and math.isfinite(fixed_s) and fixed_s >= 0):
        found = f"they are {token_s:g} and {fixed_s:g}"
        raise InputError(f"--token-time must be above 0 and --fixed-time at least 0 seconds; {found}")
    return fixed_s + token_s * tokens
