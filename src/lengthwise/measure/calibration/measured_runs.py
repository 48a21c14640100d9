"""Checks the measured runs of a calibration, and splits them into fitted and held-out requests."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise import catalog
from lengthwise.measure.calibration.result import METRICS, Calibration
from lengthwise.measure.prefix_cache import prefix_warnings
from lengthwise.metrics import request_column
from lengthwise.metrics.columns import clock_warning
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import MAX_CLIENT_CPU_SHARE, Floats, RequestRecords, RunResult, Status, shape_facts
from lengthwise.schema.workload import Workload

Mask = npt.NDArray[np.bool_]
MIN_TPOT_TOKENS = 8
BLOCKS = 12  # blocks of time per run: requests share a queue, so that single requests are not independent


@dataclass(frozen=True)
class Run:
    """One measured run, with masks of its fitted requests and of its held-out requests, whose errors are reported."""

    name: str
    workload: Workload  # all requests that the engine worked on, with their measured lengths
    seconds: dict[str, Floats]  # [n] by metric; NaN where unknown
    fit: Mask  # [n] fitted requests
    validation: Mask  # [n] held-out requests
    measured: RunResult


def run_of(measured: RunResult, name: str, validation: float | None) -> Run:
    """Return a run whose last requests, a share of ``validation``, are held out. Raises InputError without requests."""
    r, requested = measured.records.requests, measured.workload
    rows = np.flatnonzero((r.status != Status.REJECTED) & np.isfinite(r.arrival_s))
    if not len(rows):
        raise InputError(f"{name} must hold requests that an engine worked on; it holds none")
    if requested.concurrency is None:
        rows = rows[np.argsort(r.arrival_s[rows], kind="stable")]
    arrival_s = np.zeros(len(rows)) if requested.concurrency else r.arrival_s[rows] - r.arrival_s[rows].min()

    requested.require_independent("a calibration")
    workload = replace(
        requested.take(rows, arrival_s),
        prompt_tokens=np.maximum(1, r.prompt_tokens[rows]),
        output_tokens=np.maximum(1, r.output_tokens[rows]),
        extra={},
    )
    last = np.zeros(len(rows), dtype=np.bool_)
    last[len(rows) - round((validation or 0.0) * len(rows)) :] = True
    return Run(name, workload, seconds_of(r, rows), ~last, last, measured)


def seconds_of(requests: RequestRecords, rows: npt.NDArray[np.intp] | None = None) -> dict[str, Floats]:
    """Return [n] seconds by metric. They are NaN for unfinished requests. TPOT is NaN for outputs below 8 tokens."""
    done = requests.status == Status.FINISHED
    seconds = {}
    for name in METRICS:
        enough = requests.output_tokens >= (MIN_TPOT_TOKENS if name == "tpot" else 1)
        column = np.where(done & enough, request_column(requests, f"{name}_s"), np.nan)
        seconds[name] = column if rows is None else column[rows]
    return seconds


def holdout_start_s(run: Run) -> float:
    """Return when the first held-out request was due, by the records' clock, or inf if no request is held out."""
    count = int(run.validation.sum())
    r = run.measured.records.requests
    due_s = np.sort(r.arrival_s[(r.status != Status.REJECTED) & np.isfinite(r.arrival_s)])
    return float(due_s[len(due_s) - count]) if count else np.inf


MIN_LATENESS_EFFECT = 0.02  # smaller changes of TTFT's mean and 95th percentile are within the noise of any run


def harmless_lateness(measured: RunResult) -> tuple[str, ...]:
    """Return the warning about a late client if the lateness is too small to affect a fit, and () otherwise."""
    client = measured.metadata.get("client")
    if not isinstance(client, Mapping):
        return ()
    warning, share, lag = client.get("late_doubt"), client.get("cpu_share"), client.get("loop_lag")
    if not isinstance(warning, str) or warning not in measured.warnings:
        return ()
    idle = isinstance(share, int | float) and share < MAX_CLIENT_CPU_SHARE
    on_time = isinstance(lag, Mapping) and lag.get("surely_often") is False
    return (warning,) if idle and on_time and lateness_effect(measured) < MIN_LATENESS_EFFECT else ()


def client_was_disturbed(measured: RunResult) -> bool:
    """Return whether other work on the client's machine affected its times, so that a repeat may help."""
    client = measured.metadata.get("client")
    if not isinstance(client, Mapping):
        return False
    lag = client.get("loop_lag")
    woke_late = isinstance(lag, Mapping) and lag.get("surely_often") is True
    return woke_late or (client.get("late_doubt") is not None and not harmless_lateness(measured))


def lateness_effect(measured: RunResult) -> float:
    """Return the share by which TTFT's mean or p95 (the larger) would shrink if all requests were sent on time."""
    r, late_s = measured.records.requests, measured.client_s
    if late_s is None:
        return np.inf
    known = (r.status == Status.FINISHED) & np.isfinite(late_s) & np.isfinite(r.first_token_s)
    if not known.any():
        return np.inf
    ttft_s = (r.first_token_s - r.arrival_s)[known]
    on_time_s = ttft_s - np.maximum(late_s[known], 0.0)
    pairs = ((np.mean(ttft_s), np.mean(on_time_s)), (np.quantile(ttft_s, 0.95), np.quantile(on_time_s, 0.95)))
    return max(float(1 - on_time / late) if late > 0 else np.inf for late, on_time in pairs)


def origin_warnings(measured: RunResult, deployment: Deployment) -> list[str]:
    """Return a sentence for each difference between run and deployment in model, GPU or parallel degrees."""
    recorded = _recorded_deployment(measured)
    own_shape, shape = shape_facts(deployment.model), recorded.get("model_shape")
    found = []
    if isinstance(shape, Mapping):
        model = f"the model {recorded.get('model')}, and the deployment's is {deployment.model.name}"
        if other := [f"{k} {shape[k]} for {v}" for k, v in own_shape.items() if shape.get(k, v) != v]:
            found.append(f"it is of {model}: {', '.join(other)}")
    else:
        for name in _model_names(measured):
            served = catalog.served_model(name)
            if served is not None and shape_facts(served) != own_shape:
                found.append(f"it is of the model {name}, and the deployment's is {deployment.model.name}")
                break
    for name in _nonempty_strings(recorded.get("gpu"), measured.metadata.get("gpu")):
        gpu, own = catalog.find_gpu(name), catalog.find_gpu(deployment.gpu.name)
        if gpu is not None and own is not None and gpu.name != own.name:
            found.append(f"it is of the GPU {name}, and the deployment's is {deployment.gpu.name}")
            break
    for degree in ("tp", "pp", "dp", "ep", "replicas"):
        own_degree = getattr(deployment.parallel, degree)
        if isinstance(recorded.get(degree), int) and recorded[degree] != own_degree:
            found.append(f"it is of {degree} {recorded[degree]}, and the deployment's is {own_degree}")
    return found


def unknown_origin(runs: Sequence[RunResult], names: Sequence[str], deployment: Deployment) -> str:
    """Return a sentence on the runs that record neither a model's shape nor a known model, or "" if there are none."""
    unknown = [
        name
        for run, name in zip(runs, names, strict=True)
        if not isinstance(_recorded_deployment(run).get("model_shape"), Mapping)
        and all(catalog.served_model(model) is None for model in _model_names(run))
    ]
    if not unknown:
        return ""
    return (
        f"the origin of these runs is unknown: {', '.join(unknown)}. They record neither a deployment nor the name of "
        f"a model in the catalog; that they are of {deployment.model.name} on {deployment.gpu.name} is assumed "
        "(`lengthwise bench` records the deployment of the scenario that it is given)"
    )


def _recorded_deployment(measured: RunResult) -> Mapping[str, Any]:
    recorded = measured.metadata.get("deployment")
    return recorded if isinstance(recorded, Mapping) else {}


def _model_names(measured: RunResult) -> Iterator[str]:
    metadata = measured.metadata
    return _nonempty_strings(
        _recorded_deployment(measured).get("model"), metadata.get("model"), metadata.get("model_id")
    )


def _nonempty_strings(*values: Any) -> Iterator[str]:
    return (value for value in values if isinstance(value, str) and value)


MIN_REQUESTS = 50
ALLOWED = ("warnings", "simulated")
CLOCK_SLACK = 1.02
MIN_OVERLAP_SHARE = 0.05  # share of a run in which a client that reads late may count too many running requests
PROMPT_SLACK = 0.02


def check_runs(runs: Sequence[RunResult], names: Sequence[str], deployment: Deployment, allow: Collection[str]) -> None:
    """Raise InputError if runs have warnings that ``allow`` does not accept, or cannot be of this deployment."""
    if unknown := sorted(set(allow) - set(ALLOWED)):
        raise InputError(f"allow takes {', '.join(ALLOWED)}; it has {', '.join(unknown)}")
    simulated = [name for run, name in zip(runs, names, strict=True) if run.is_simulated]
    if simulated and "simulated" not in allow:
        found = "simulated runs would only repeat the simulator. Measure with `lengthwise bench`, or allow it (--force)"
        raise InputError(f"{', '.join(simulated)} must be measured on a real engine; {found}")
    doubtful = {}
    for run, name in zip(runs, names, strict=True):
        clock, harmless = clock_warning(run.records.requests, run.records.end_s), harmless_lateness(run)
        warnings = [warning for warning in run.warnings if warning not in harmless]
        warnings += [f"{n} requests failed of {reason}" for reason, n in run.errors.items()] + (
            [clock] if clock else []
        )
        if warnings := [*warnings, *prefix_warnings(run), *origin_warnings(run, deployment)]:
            doubtful[name] = "; ".join(warnings)
    if doubtful and "warnings" not in allow:
        if len(doubtful) == 1:
            ((name, warning),) = doubtful.items()
            hint = "Measure again, or allow it (--allow-warnings)"
            raise InputError(f"{name} must be a run without warnings; it has these: {warning}. {hint}")
        lines = "".join(f"\n  {name}: {warning}" for name, warning in doubtful.items())
        raise InputError(
            f"runs must be without warnings; {len(doubtful)} of {len(runs)} have warnings. Measure these "
            f"again, leave them out, or allow them (--allow-warnings):{lines}"
        )
    for run, name in zip(runs, names, strict=True):
        _check_possible(run, name, deployment)


def _check_possible(measured: RunResult, name: str, deployment: Deployment) -> None:
    r, requested = measured.records.requests, measured.workload.prompt_tokens
    difference = np.median(np.abs(r.prompt_tokens - requested) / np.maximum(1, requested))
    if difference > PROMPT_SLACK:
        raise InputError(
            f"{name} must be of the workload it holds; half of its prompts differ by {difference:.0%} or more "
            "in length from those requested. Records and workload do not belong together, or the server "
            "adds a chat template: send token ids, or count with its tokenizer"
        )
    ran = np.isin(r.status, (Status.FINISHED, Status.UNFINISHED, Status.TIMED_OUT))
    total = np.where(ran, r.prompt_tokens + r.output_tokens, 0)
    longest = int(total.max(initial=0))
    if longest > deployment.max_model_len:
        context = f"{deployment.max_model_len} tokens a request (max_model_len)"
        found = f"request {int(total.argmax())} has {longest}. Give the engine's own settings in the scenario"
        raise InputError(f"{name} must have run on this deployment, which takes {context}; {found}")
    # A request runs at least from its first token to its last.
    done = (r.status == Status.FINISHED) & np.isfinite(r.first_token_s) & np.isfinite(r.finished_s)
    running = sustained_concurrency(r.first_token_s[done], r.finished_s[done], MIN_OVERLAP_SHARE)
    limit = deployment.limits.max_num_seqs * deployment.parallel.replicas
    if running > limit * CLOCK_SLACK + 1:
        raise InputError(
            f"{name} must have run on this deployment, of which at most {limit} requests run at a time "
            f"(max_num_seqs {deployment.limits.max_num_seqs}, {deployment.parallel.replicas} replicas); "
            f"{running} did for {MIN_OVERLAP_SHARE:.0%} of the time. Give the engine's own settings in the scenario"
        )
    # An error rather than a warning: without a first token after its request there is no TTFT to fit.
    ttft_s = (r.first_token_s - r.arrival_s)[r.status == Status.FINISHED]
    ttft_s = ttft_s[np.isfinite(ttft_s)]
    if len(ttft_s) and (ttft_s < 0).all():
        raise InputError(
            f"{name} must have first tokens after their requests; all {len(ttft_s):,} come before them, by up to "
            f"{-ttft_s.min():.3g} s. Arrivals and tokens are of clocks that disagree: measure both with one"
        )


def sustained_concurrency(start_s: np.ndarray, end_s: np.ndarray, share: float) -> int:
    """Return the largest n such that n or more intervals are open for ``share`` of the time with any open interval."""
    times = np.concatenate([end_s, start_s])
    change = np.concatenate([np.full(len(end_s), -1), np.ones(len(start_s), dtype=np.int64)])
    order = np.lexsort((change, times))  # ends before starts: the intervals are open
    count, lasts_s = np.maximum(np.cumsum(change[order])[:-1], 0), np.diff(times[order])
    lasting_s = np.bincount(count, lasts_s, minlength=1)
    lasting_s[0] = 0.0
    at_least_s = np.cumsum(lasting_s[::-1])[::-1]
    return int(np.flatnonzero(at_least_s >= share * at_least_s[0])[-1]) if at_least_s[0] > 0 else 0


def finished_counts(runs: Sequence[Run]) -> tuple[int, int]:
    """Return the number of finished fitted requests, and the number of finished held-out requests."""
    finished = [np.isfinite(run.seconds["jct"]) for run in runs]
    fitted = sum(int((run.fit & done).sum()) for run, done in zip(runs, finished, strict=True))
    return fitted, sum(int((run.validation & done).sum()) for run, done in zip(runs, finished, strict=True))


def check_enough(runs: Sequence[Run]) -> None:
    """Raise InputError if too few finished requests are fitted or held out."""
    fitted, held_out = finished_counts(runs)
    for count, least, purpose, hint in (
        (fitted, MIN_REQUESTS, "fit to", "hold out less"),
        (held_out, MIN_REQUESTS // 5, "report on", "hold out more"),
    ):
        if count < least:
            needed = f"{least} finished requests or more to {purpose}; there are {count}"
            raise InputError(f"a calibration needs {needed}. Measure more, or {hint}")


def origin_notes(
    found: Calibration, runs: Sequence[Run], deployment: Deployment, allow: Collection[str]
) -> tuple[str, ...]:
    """Return notes on runs that may not belong to the deployment. Raises InputError if they probably do not."""
    unknown = unknown_origin([run.measured for run in runs], [run.name for run in runs], deployment)
    if found.warning and unknown and "warnings" not in allow:
        raise InputError(
            f"runs must be of the deployment that they are calibrated to, but these probably are not: the calibration "
            f"{found.warning}; and {unknown}. Give the model, GPU, degrees and limits of the engine that was measured; "
            "if these are right, use the tables anyway (--allow-warnings)"
        )
    warning = f"do not rely on this calibration: it {found.warning}" if found.warning else ""
    return tuple(note for note in (warning, unknown) if note)


MIN_LOADS = 3
"""Loads from which on complete loads are held out. The lowest and the highest are fitted, and so are those of prompts
that share prefixes, which alone show what cached tokens cost."""


@dataclass(frozen=True)
class Split:
    """All runs of a calibration, a sentence on which of their requests are held out, and notes."""

    runs: tuple[Run, ...]
    words: str
    notes: tuple[str, ...] = ()

    @property
    def fitted(self) -> list[Run]:
        """The runs that have fitted requests."""
        return [run for run in self.runs if run.fit.any()]

    @property
    def validation(self) -> list[Run]:
        """The runs that have held-out requests."""
        return [run for run in self.runs if run.validation.any()]


def split_of(
    runs: Sequence[RunResult], deployment: Deployment, holdout: float | Sequence[RunResult], allow: Collection[str]
) -> Split:
    """Check the runs, or raise InputError, and decide which requests are fitted and which are held out.

    If ``holdout`` has runs, these are held out. A share holds out complete loads with all their repeats if there are
    MIN_LOADS loads. With fewer loads, it holds out the last requests of each run.
    """
    given = list(holdout) if isinstance(holdout, Sequence) else []
    share = float(holdout) if isinstance(holdout, float | int) else 0.0
    if not runs or (not given and not 0 < share < 1):
        needed = "one run or more, and something to hold out: a share above 0 and below 1, or runs"
        raise InputError(f"a calibration needs {needed}; there are {len(runs)} runs, and holdout is {share}")
    every = [*runs, *given]
    plain = [measured.records.name or measured.workload.name or "run" for measured in every]
    names = [name if plain.count(name) == 1 else f"{name} {i + 1}" for i, name in enumerate(plain)]
    check_runs(every, names, deployment, allow)
    known: dict[bytes, int] = {}
    for i, measured in enumerate(every):
        other = known.setdefault(measured.records.requests.finished_s.tobytes(), i)
        if other != i:  # no engine repeats itself to the bit
            same = f"{names[other]} and {names[i]} are the same records"
            raise InputError(f"each run must be given once, to be fitted or held out; {same}: measure another")
    loads: dict[tuple[object, ...], list[int]] = {}  # repeats by their requests
    for i, measured in enumerate(every):
        loads.setdefault(_repeat_key(measured), []).append(i)
    notes = []
    if given:
        shares = [0.0] * len(runs) + [1.0] * len(given)
        words = f"fitted to {_runs(len(runs))}, held out {_runs(len(given))}"
        for i in range(len(runs), len(every)):
            fitted = [other for other in loads[_repeat_key(every[i])] if other < len(runs)]
            if fitted:
                reason = "it measures noise, not a new load"
                notes.append(f"{names[i]} is a repeat of a run that was fitted ({names[fitted[-1]]}): {reason}")
    elif len(plain_loads := [own for own in loads.values() if runs[own[0]].workload.prefixes is None]) >= MIN_LOADS:
        held_out = _middle_loads(runs, plain_loads, share)
        shares = [1.0 if i in held_out else 0.0 for i in range(len(runs))]
        words = (
            f"fitted to {_runs(len(runs) - len(held_out))}, held out {', '.join(names[i] for i in sorted(held_out))}"
        )
    else:
        shares = [share] * len(runs)
        first = f"the first {1 - share:.0%} of the requests{' of each run' if len(runs) > 1 else ''}"
        words = f"fitted to {first}, held out the last ones, which were simulated in the same queue"
    notes += [
        f"{name}: {warning}; without it TTFT's mean and 95th percentile would be {lateness_effect(run):.1%} shorter at "
        "most, which is too little to affect a fit, so that the run was used"
        for run, name in zip(every, names, strict=True)
        for warning in harmless_lateness(run)
    ]
    each = zip(every, names, shares, strict=True)
    return Split(tuple(run_of(measured, name, part) for measured, name, part in each), words, tuple(notes))


def _runs(n: int) -> str:
    return f"{n} run{'s' if n > 1 else ''}"


def _repeat_key(measured: RunResult) -> tuple[object, ...]:
    """Return what a run has in common with its repeats: requested lengths, arrivals (to 1 ms) and concurrency."""
    w = measured.workload
    arrival_s = np.round(w.arrival_s - np.min(w.arrival_s, initial=np.inf), 3)
    return w.prompt_tokens.tobytes(), w.output_tokens.tobytes(), arrival_s.tobytes(), w.concurrency


def _middle_loads(runs: Sequence[RunResult], loads: Sequence[Sequence[int]], share: float) -> set[int]:
    """Return the indices of runs to hold out, at evenly spaced loads, but not at the lowest or the highest."""

    def load_then_index(own: Sequence[int]) -> tuple[float, int]:
        requests = [runs[i].records.requests for i in own]
        spans_s = [max(float(np.nanmax(r.finished_s) - np.nanmin(r.arrival_s)), 1e-9) for r in requests]
        each = [float(np.nansum(r.finished_s - r.arrival_s)) / s for r, s in zip(requests, spans_s, strict=True)]
        return float(np.mean(each)), own[0]

    inner = sorted(loads, key=load_then_index)[1:-1]
    count = min(len(inner), max(1, round(share * len(loads))))
    return {r for i in range(count) for r in inner[(2 * i + 1) * len(inner) // (2 * count)]}
