"""Turns the table [workload] into models of lengths and arrivals, and trace files into requests."""

from __future__ import annotations

import difflib
import gzip
import math
import shlex
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lengthwise import workload as w
from lengthwise.config.files import resolved
from lengthwise.config.sections import SessionsTable, WorkloadSection
from lengthwise.schema.errors import InputError, TraceError, UnknownNameError
from lengthwise.schema.workload import Workload

if TYPE_CHECKING:
    from lengthwise.predict.sample_files import Served

Ints = npt.NDArray[np.int64]
LOG = "log"
"""The format that ``lengthwise predict train`` reads: rows with a prompt, an output or its length, and a model."""


def read_trace(
    path: Path | str,
    format: str | Mapping[str, str] | None = None,  # noqa: A002 - the name of the key in scenario files
    *,
    time_scale: float = 1.0,
    sort: bool = False,
    replayed: bool = False,
) -> Workload:
    """Read the requests of a trace or of a log of texts; ``format`` as for ``workload.read``, None: it is detected.

    With ``replayed``, a log must have arrival times. Raises TraceError, or InputError for an invalid log.
    """
    if isinstance(format, Mapping):
        return w.read(path, format, time_scale=time_scale, sort=sort)
    if format is not None and format not in (*w.READABLE, LOG):
        raise UnknownNameError("trace format", format, (*w.READABLE, LOG))
    found = format or w.detect(path)
    if found in (None, LOG):
        _require_commas(Path(path))
    if found not in (None, LOG):
        return w.read(path, format, time_scale=time_scale, sort=sort)
    from lengthwise.predict.sample_files import served

    try:
        log = served(path)
    except InputError as error:
        # A file of unknown format whose first row is none of a log: show the columns that it would need.
        if found != LOG and ", row 1 must have an output" in str(error):
            try:
                w.read(path)
            except TraceError as unknown:
                if not (columns := _columns(path)):
                    raise unknown from None
                near = _renamed(columns)
                pairs = {"prompt_tokens": "NAME", "output_tokens": "NAME"} | {near[column]: column for column in near}
                given = " ".join(f"--column {shlex.quote(f'{name}={column}')}" for name, column in pairs.items())
                raise TraceError(
                    f"{path}, line 1: must have the columns of a trace, or of a log: prompt_tokens, output_tokens (or "
                    "texts: prompt, output) and arrival_s or arrival_ms; it has "
                    f"{', '.join(columns[:12])[:200]}. Rename your columns, or give {given}"
                ) from None
        raise
    if replayed and log.arrival_s is None:
        raise TraceError(
            f"{path}: a log without times of arrival cannot be replayed; give workload.request_rate, "
            "workload.concurrency or workload.arrivals, or a column arrival_s"
        )
    return _workload_of_log(Path(path), log, time_scale, sort=sort or not replayed)


def _workload_of_log(path: Path, log: Served, time_scale: float, *, sort: bool) -> Workload:
    at_s = np.zeros(len(log.output_tokens)) if log.arrival_s is None else log.arrival_s
    if not sort and (np.diff(at_s) < 0).any():
        row = int(np.flatnonzero(np.diff(at_s) < 0)[0]) + 2
        raise TraceError(f"{path}, request {row}: arrives before the one above it; pass sort=True")
    order = np.argsort(at_s, kind="stable")
    notes = [f"{log.estimated:,} with tokens estimated"] if log.estimated else []
    notes += [f"without {log.left_out:,} failed or empty"] if log.left_out else []
    try:
        return Workload(
            arrival_s=(at_s[order] - at_s[order[0]]) * time_scale,
            prompt_tokens=log.prompt_tokens[order],
            output_tokens=log.output_tokens[order],
            max_tokens=None if log.max_tokens is None else log.max_tokens[order],
            extra={name: column[order] for name, column in log.texts.items()},
            name=path.name.partition(".")[0] + (f" ({', '.join(notes)})" if notes else ""),
        )
    except InputError as error:
        raise TraceError(f"{path}: {error}") from error


def _columns(path: Path | str) -> list[str]:
    """Return the columns in the first line of a file, gzipped or not; [] for JSON and for a file without text."""
    from lengthwise.workload.trace_rows import Source as File

    try:
        with gzip.open(path) if str(path).endswith(".gz") else Path(path).open("rb") as file:
            first = File(Path(path), file.readline(1 << 16).removeprefix(b"\xef\xbb\xbf"))
    except (OSError, EOFError, zlib.error):
        return []
    return [] if first.data.lstrip()[:1] in (b"{", b"[") or first.data[:4] == b"PAR1" else first.header


def _require_commas(path: Path) -> None:
    columns = _columns(path)
    for sign, name in (("\t", "tabs"), (";", "semicolons")):
        if len(columns) == 1 and sign in columns[0]:
            found = ", ".join(columns[0].split(sign)[:6])
            raise TraceError(f"{path}: columns must be separated by commas; {name} separate {found}. Replace them")


def _renamed(columns: list[str]) -> dict[str, str]:
    """Return the columns of a log that resemble missing ones, each with the name that a log gives it."""
    from lengthwise.predict.sample_files import NAMES, misspelt, unread_time

    named = {name: column for column, names in NAMES.items() for name in names}
    given = {column.strip().lower().replace(" ", "_"): column for column in columns}
    near = {given[key]: named[name] for key, name in misspelt(columns).items()}
    return near | unread_time(columns)


def column_notes(path: Path | str) -> list[str]:
    """Return a note on each ignored column of a CSV trace or log whose name is close to a known one that it lacks.

    Reads the first line. A file that cannot be read has no notes: its reader reports it.
    """
    from lengthwise.predict.sample_files import unread_time
    from lengthwise.workload.trace_rows import ARRIVALS, FORMATS, TEXTS

    columns = _columns(path)
    form = next((one for one in FORMATS.values() if one.kind == "csv" and {*one.required} <= {*columns}), None)
    if form is None:
        near = _renamed(columns)
    else:
        known = {form.arrival, *form.required, *form.extra, *TEXTS}
        close = {one: difflib.get_close_matches(one.lower(), known - {*columns}, n=1, cutoff=0.85) for one in columns}
        near = {
            one: found[0] for one, found in close.items() if found and one not in known and one.lower() not in TEXTS
        }
        if form.arrival not in columns:
            time = unread_time(columns, ARRIVALS)
            near |= {one: form.arrival if name == "arrival_s" else name for one, name in time.items()}
    return [f"{path}: column {one} is ignored; did you mean {name}?" for one, name in near.items()]


@dataclass(frozen=True)
class Source:
    """The models from which requests are drawn, and the requests of a ``replayed`` trace with its own arrivals.

    With ``sessions``, prompts of ``lengths`` are the new tokens of a turn, and ``arrivals`` are those of sessions.
    """

    lengths: w.Lengths
    arrivals: w.Arrivals
    name: str
    replayed: Workload | None = None
    sessions: w.Sessions | None = None

    def require_independent(self, owner: str) -> None:
        """Raise InputError if requests have sessions. ``owner`` names the feature that does not support them."""
        if self.replayed is not None and self.replayed.after is not None:
            raise InputError(
                f"{owner} does not support requests that wait for others yet, as those of sessions in "
                f"{self.replayed.name} do. For their lengths alone give workload.prompt and output, or simulate"
            )
        if self.sessions is not None:
            raise InputError(
                f"{owner} does not support workload.sessions, groups and tools yet. Remove them, or simulate"
            )


def source_of(section: WorkloadSection, folder: Path) -> Source:
    """Return the source of the requests that a [workload] section describes."""
    trace = None
    if section.trace is not None:
        path, replayed = resolved(section.trace, folder), section.is_replay
        sort = section.sort or not replayed
        try:
            form = section.columns or section.format
            trace = read_trace(path, form, time_scale=section.time_scale, sort=sort, replayed=replayed)
        except TraceError as error:  # the reader names its own argument
            raise TraceError(str(error).replace("pass sort=True", "set workload.sort = true")) from None
    if section.is_replay and trace is not None:
        return Source(w.Samples.of(trace), w.Replay(trace.arrival_s), trace.name, _replayed(section, trace))
    if section.preset is not None:
        lengths = w.preset(section.preset).lengths
    elif trace is not None:
        lengths = w.Samples.of(trace)
    else:
        assert section.prompt is not None  # the section requires them
        assert section.output is not None
        lengths = w.Joint(section.prompt.build(), section.output.build(), section.correlation)
    name = section.preset or (trace.name if trace else "")
    return Source(_limited(section, lengths), _arrivals(section), name, sessions=_sessions(section))


def _sessions(section: WorkloadSection) -> w.Sessions | None:
    table, groups, tools = section.sessions, section.groups, section.tools
    if table is None and groups is None and tools is None:
        return None
    table, calls = table or SessionsTable(), None
    if tools is not None:
        time, tokens = tools.time.build(), tools.tokens.build()
        calls = w.Tools(tools.calls, time, tokens, tools.max_calls, tools.fan_out, tools.fan_out_share)
    common = None if groups is None else w.Groups(groups.count, groups.system_prompt.build(), groups.zipf)
    limits = (table.max_turns, table.max_context_tokens)
    return w.Sessions(table.turns, table.think_time.build(), *limits, common, calls)


def _arrivals(section: WorkloadSection) -> w.Arrivals:
    rate_rps = section.rate_rps
    if section.concurrency is not None:
        return w.ClosedLoop(section.concurrency)
    if rate_rps is not None and math.isinf(rate_rps):
        return w.AllAtOnce()
    if section.arrivals is not None:
        return section.arrivals.build(rate_rps or 1.0)
    if rate_rps is not None:
        return w.Poisson(rate_rps)
    assert section.preset is not None  # the section requires one of these
    return w.preset(section.preset).arrivals


def _limited(section: WorkloadSection, lengths: w.Lengths) -> w.Lengths:
    """Return the lengths with the limits of [workload]: those that clients set, and those of the engine or dataset."""
    if section.max_tokens is not None or section.ignore_eos:
        client = section.max_tokens
        lengths = w.ClientLimits(lengths, "own" if client is None else client.build(), ignore_eos=section.ignore_eos)
    limits = (section.max_total_tokens, section.max_prompt_tokens, section.max_output_tokens)
    return lengths if limits == (None, None, None) else w.Capped(lengths, *limits, cut=section.cut)


@dataclass(frozen=True, eq=False)
class InOrder(w.Samples):
    """Observed pairs of lengths, which are returned in their own order instead of drawn at random."""

    def draw(self, n: int, rng: np.random.Generator) -> w.Drawn:  # noqa: ARG002 - the signature of Samples
        """Return copies of the first ``n`` pairs, with texts and limits."""
        return self.take(np.arange(n))


def _replayed(section: WorkloadSection, trace: Workload) -> Workload:
    n = min(section.num_requests or len(trace), len(trace))
    trace = trace.take(np.arange(n))
    lengths, arrivals = _limited(section, InOrder.of(trace)), w.Replay(trace.arrival_s)
    made = w.generate(n, lengths, arrivals, predicted=section.predicted, tenants=section.tenants, name=trace.name)
    is_cut = (made.prompt_tokens != trace.prompt_tokens).any() or (made.output_tokens != trace.output_tokens).any()
    if is_cut and trace.prefixes is not None and (trace.prefixes.turns >= 0).any():
        raise InputError(
            "workload.max_prompt_tokens, max_output_tokens, max_total_tokens and max_tokens cannot shorten sessions, "
            "whose later prompts contain the earlier ones, nor can ignore_eos lengthen them; leave them out"
        )
    return replace(
        made,
        predicted_tokens=trace.predicted_tokens if section.predicted == "none" else made.predicted_tokens,
        priority=trace.priority,
        tenant=made.tenant if trace.tenant is None else trace.tenant,
        extra=trace.extra | made.extra,
        concurrency=trace.concurrency,
        after=trace.after,
        prefixes=None if trace.prefixes is None else trace.prefixes.within(made.prompt_tokens),
    )
