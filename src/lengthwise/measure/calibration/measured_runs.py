"""A measured run as a calibration looks at it: requests to simulate, and what came of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise import catalog
from lengthwise.measure.calibration.result import METRICS, Calibration
from lengthwise.measure.prefix_cache import prefix_doubts
from lengthwise.metrics import request_column
from lengthwise.metrics.columns import clock_warning
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import IDLE_SHARE, Measured, RequestRecords, Status, shape_facts
from lengthwise.schema.workload import Workload

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
LEAST_TPOT_TOKENS = 8
BLOCKS = 12
"""Requests that follow each other wait for the same queue: they are independent by blocks of time at most."""


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: For tables.
        workload: What is simulated: every request that the engine worked on, with the lengths it had.
        seconds: [n] by metric, what was measured; NaN where it says nothing.
        fit: [n] requests whose times are fitted to.
        validation: [n] requests whose times are held out.
        measured: The whole of it.
    """

    name: str
    workload: Workload
    seconds: dict[str, Floats]
    fit: Mask
    validation: Mask
    measured: Measured


def run_of(measured: Measured, name: str, validation: float | None) -> Run:
    """A run of which the last ``validation`` of its requests are held out, or all of them (1.0), or none (0.0)."""
    r = measured.records.requests
    kept = np.flatnonzero((r.status != Status.REJECTED) & np.isfinite(r.arrival_s))
    if not len(kept):
        raise InputError(f"{name} must hold requests that an engine worked on; it holds none")
    if measured.workload.concurrency is None:
        kept = kept[np.argsort(r.arrival_s[kept], kind="stable")]
    late = np.zeros(len(kept), dtype=np.bool_)
    share = 0.0 if validation is None else validation
    late[len(kept) - round(share * len(kept)) :] = True
    return Run(
        name=name,
        workload=_workload(measured.workload, r, kept),
        seconds=seconds_of(r, kept),
        fit=~late,
        validation=late,
        measured=measured,
    )


def seconds_of(requests: RequestRecords, rows: npt.NDArray[np.intp] | None = None) -> dict[str, Floats]:
    """[n] seconds by metric of finished requests, else NaN; times between tokens only of 8 tokens or more."""
    done = requests.status == Status.FINISHED
    told = {
        name: np.where(done & (requests.output_tokens >= (LEAST_TPOT_TOKENS if name == "tpot" else 1)), s, np.nan)
        for name, s in ((name, request_column(requests, f"{name}_s")) for name in METRICS)
    }
    return told if rows is None else {name: s[rows] for name, s in told.items()}


def _workload(requested: Workload, r: RequestRecords, retained: npt.NDArray[np.intp]) -> Workload:
    """The requests as they were: measured arrivals and lengths, in the order of arrival."""

    def rows(column: Any) -> Any:
        return None if column is None else column[retained]

    arrival_s = (
        np.zeros(len(retained)) if requested.concurrency else r.arrival_s[retained] - r.arrival_s[retained].min()
    )
    return replace(
        requested,
        arrival_s=arrival_s,
        prompt_tokens=np.maximum(1, r.prompt_tokens[retained]),
        output_tokens=np.maximum(1, r.output_tokens[retained]),
        predicted_tokens=rows(requested.predicted_tokens),
        predictions=None if requested.predictions is None else requested.predictions.take(retained.astype(np.int64)),
        priority=rows(requested.priority),
        tenant=rows(requested.tenant),
        extra={},
    )


def until_s(run: Run) -> float:
    """When the first held-out request was due, by the clock of the records; infinite where none is held out."""
    held = int(run.validation.sum())
    r = run.measured.records.requests
    deadline_s = np.sort(r.arrival_s[(r.status != Status.REJECTED) & np.isfinite(r.arrival_s)])
    return float(deadline_s[len(deadline_s) - held]) if held else np.inf


MOVES = 0.02
"""A lateness that moves the mean or the 95th percentile of TTFT by less than this is within any run's noise."""


def harmless_lateness(measured: Measured) -> tuple[str, ...]:
    """The doubts of a late client that no fit can feel; none where its loop was busy or often woke late."""
    client = measured.metadata.get("client")
    doubt = client.get("late_doubt") if isinstance(client, Mapping) else None
    if not isinstance(client, Mapping) or not isinstance(doubt, str) or doubt not in measured.warnings:
        return ()
    return (doubt,) if _idle(client) and lateness_moves(measured) < MOVES else ()


def lateness_moves(measured: Measured) -> float:
    """By how much the larger of TTFT's mean and 95th percentile would fall had all left on time, relative."""
    r, late_s = measured.records.requests, measured.client_s
    if late_s is None:
        return float("inf")
    known = (r.status == Status.FINISHED) & np.isfinite(late_s) & np.isfinite(r.first_token_s)
    if not known.any():
        return float("inf")
    ttft_s = (r.first_token_s - r.arrival_s)[known]
    on_time_s = ttft_s - np.maximum(late_s[known], 0.0)
    pairs = [(of(ttft_s), of(on_time_s)) for of in (np.mean, lambda x: np.quantile(x, 0.95))]
    return max(float(1 - on_time / told) if told > 0 else float("inf") for told, on_time in pairs)


def _idle(client: Mapping[str, Any]) -> bool:
    share, lag = client.get("cpu_share"), client.get("loop_lag")
    often = lag.get("surely_often") if isinstance(lag, Mapping) else None
    return isinstance(share, int | float) and share < IDLE_SHARE and often is False


DEGREES = ("tp", "pp", "replicas")


def origin_warnings(measured: Measured, deployment: Deployment) -> list[str]:
    """A sentence for each fact that surely differs; names that the catalog does not know tell nothing."""
    metadata, told = measured.metadata, _report(measured)
    found = list(_model_doubts(told, metadata, deployment))
    for name in _nonempty_strings(told.get("gpu"), metadata.get("gpu")):
        gpu, own = catalog.find_gpu(name), catalog.find_gpu(deployment.gpu.name)
        if gpu is not None and own is not None and gpu.name != own.name:
            found.append(f"it is of the GPU {name}, and the deployment's is {deployment.gpu.name}")
            break
    for degree in DEGREES:
        own_degree = getattr(deployment.parallel, degree)
        if isinstance(told.get(degree), int) and told[degree] != own_degree:
            found.append(f"it is of {degree} {told[degree]}, and the deployment's is {own_degree}")
    return found


def untold_origin(runs: Sequence[Measured], names: Sequence[str], deployment: Deployment) -> str:
    """A sentence on the runs of which nothing tells the model, neither its shape nor a known name; or nothing."""
    untold = [name for run, name in zip(runs, names, strict=True) if not _tells_model(run)]
    if not untold:
        return ""
    return (
        f"where these runs come from is not told: {', '.join(untold)}. No deployment is kept with them, nor the name "
        f"of a model that the catalog knows; that they are of {deployment.model.name} on {deployment.gpu.name} is "
        "taken on trust (`lengthwise bench` keeps the deployment of the scenario that it is given)"
    )


def _tells_model(measured: Measured) -> bool:
    metadata, told = measured.metadata, _report(measured)
    served = _nonempty_strings(told.get("model"), metadata.get("model"), metadata.get("model_id"))
    return isinstance(told.get("model_shape"), Mapping) or any(
        catalog.served_model(name) is not None for name in served
    )


def _report(measured: Measured) -> Mapping[str, Any]:
    """What the records keep of their deployment; nothing where they do not."""
    told = measured.metadata.get("deployment")
    return told if isinstance(told, Mapping) else {}


def _model_doubts(report: Mapping[str, Any], metadata: Mapping[str, Any], deployment: Deployment) -> Iterator[str]:
    """By the shape that the records keep; without one by what the catalog knows of the names they tell."""
    own, shape = shape_facts(deployment.model), report.get("model_shape")
    if isinstance(shape, Mapping):
        other = {key: shape[key] for key, value in own.items() if shape.get(key, value) != value}
        if other:
            entries = ", ".join(f"{key} {value} for {own[key]}" for key, value in other.items())
            yield f"it is of the model {report.get('model')}, and the deployment's is {deployment.model.name}: {entries}"
        return
    for name in _nonempty_strings(report.get("model"), metadata.get("model"), metadata.get("model_id")):
        model = catalog.served_model(name)
        if model is not None and shape_facts(model) != own:
            yield f"it is of the model {name}, and the deployment's is {deployment.model.name}"
            return


def _nonempty_strings(*values: Any) -> Iterator[str]:
    return (value for value in values if isinstance(value, str) and value)


MIN_REQUESTS = 50
ALLOWED = ("warnings", "simulated")
CLOCK_SLACK = 1.02
BRIEFLY = 0.05
"""Share of a run in which more may seem to run than do: what a client reads late seems to run on."""
PROMPT_SLACK = 0.02


def check_runs(runs: Sequence[Measured], names: Sequence[str], deployment: Deployment, allow: Collection[str]) -> None:
    """Nothing, if the runs can be of this deployment and may be trusted; all doubtful ones are told at once.

    Raises:
        InputError: Some were simulated, are doubted, or cannot have run on this deployment.
    """
    unknown = sorted(set(allow) - set(ALLOWED))
    if unknown:
        raise InputError(f"allow takes {', '.join(ALLOWED)}; it has {', '.join(unknown)}")
    made = [name for run, name in zip(runs, names, strict=True) if run.is_simulated]
    if made and "simulated" not in allow:
        raise InputError(
            f"{', '.join(made)} must be measured on a real engine; simulated runs would only repeat the simulator. "
            "Measure with `lengthwise bench`, or allow it (--force)"
        )
    told = {name: _warnings(run, deployment) for run, name in zip(runs, names, strict=True)}
    doubted = {name: warnings for name, warnings in told.items() if warnings}
    if doubted and "warnings" not in allow:
        raise InputError(_warning_text(doubted, len(runs)))
    for run, name in zip(runs, names, strict=True):
        _check_lengths(run, name, deployment)
        _check_running(run.records.requests, name, deployment)
        _check_first_tokens(run.records.requests, name)


def _warnings(measured: Measured, deployment: Deployment) -> list[str]:
    failed = (f"{n} requests failed of {why}" for why, n in measured.errors.items())
    clock = clock_warning(measured.records.requests, measured.records.end_s)
    harmless = harmless_lateness(measured)
    own = (doubt for doubt in measured.warnings if doubt not in harmless)
    about = [*prefix_doubts(measured), *origin_warnings(measured, deployment)]
    return [*own, *failed, *([clock] if clock else []), *about]


def _warning_text(report: Mapping[str, Sequence[str]], of: int) -> str:
    """One sentence on one doubtful run; of several a line each."""
    if len(report) == 1:
        ((name, warnings),) = report.items()
        return (
            f"{name} must be a run that can be trusted; of this one it is told: {'; '.join(warnings)}. "
            "Measure again, or allow it (--allow-doubts)"
        )
    lines = "".join(f"\n  {name}: {'; '.join(warnings)}" for name, warnings in report.items())
    return (
        f"runs must be such that can be trusted; of {len(report)} of {of} doubts are told. Measure these again, leave "
        f"them out, or allow them (--allow-doubts):{lines}"
    )


def check_different(runs: Sequence[Measured], names: Sequence[str]) -> None:
    """Nothing, if no run is there twice.

    Raises:
        InputError: Two are the same records to the bit, as no engine repeats itself.
    """
    known: dict[bytes, int] = {}
    for i, (measured, name) in enumerate(zip(runs, names, strict=True)):
        other = known.setdefault(measured.records.requests.finished_s.tobytes(), i)
        if other != i:
            raise InputError(
                f"each run must be given once; {names[other]} and {name} are the same records. A run that is fitted to "
                "cannot be held out as well: measure another"
            )


def _check_lengths(measured: Measured, name: str, deployment: Deployment) -> None:
    r, asked = measured.records.requests, measured.workload.prompt_tokens
    apart = np.abs(r.prompt_tokens - asked) / np.maximum(1, asked)
    if np.median(apart) > PROMPT_SLACK:
        raise InputError(
            f"{name} must be of the workload it holds; half of its prompts differ by {np.median(apart):.0%} or more "
            "in length from those that were asked for. Records and workload do not belong together, or the server "
            "adds a chat template: send token ids, or count with its tokenizer"
        )
    took = np.isin(r.status, (Status.FINISHED, Status.UNFINISHED, Status.TIMED_OUT))
    total = np.where(took, r.prompt_tokens + r.output_tokens, 0)
    longest = int(total.max(initial=0))
    if longest > deployment.max_model_len:
        raise InputError(
            f"{name} must have run on this deployment, which takes {deployment.max_model_len} tokens a request "
            f"(max_model_len); request {int(total.argmax())} has {longest}. Give the engine's own settings in "
            "the scenario"
        )


def _check_running(r: RequestRecords, name: str, deployment: Deployment) -> None:
    """From first token to last a request runs for certain; clocks may overlap a little, clients read late at times."""
    done = (r.status == Status.FINISHED) & np.isfinite(r.first_token_s) & np.isfinite(r.finished_s)
    running = at_once(r.first_token_s[done], r.finished_s[done], BRIEFLY)
    most = deployment.limits.max_num_seqs * deployment.parallel.replicas
    if running > most * CLOCK_SLACK + 1:
        raise InputError(
            f"{name} must have run on this deployment, of which at most {most} requests run at a time "
            f"(max_num_seqs {deployment.limits.max_num_seqs}, {deployment.parallel.replicas} replicas); "
            f"{running} did for {BRIEFLY:.0%} of the time. Give the engine's own settings in the scenario"
        )


def _check_first_tokens(r: RequestRecords, name: str) -> None:
    """No doubt that one may allow: without a first token after its request there is no TTFT to fit to."""
    ttft_s = (r.first_token_s - r.arrival_s)[r.status == Status.FINISHED]
    ttft_s = ttft_s[np.isfinite(ttft_s)]
    if len(ttft_s) and (ttft_s < 0).all():
        raise InputError(
            f"{name} must have first tokens after their requests; all {len(ttft_s):,} come before them, by up to "
            f"{-ttft_s.min():.3g} s. Arrivals and tokens are of clocks that disagree: measure both with one"
        )


def at_once(start_s: np.ndarray, end_s: np.ndarray, share: float) -> int:
    """How many open intervals share a moment, for ``share`` of the time that any takes or longer; 0: there are none."""
    times = np.concatenate([end_s, start_s])
    change = np.concatenate([np.full(len(end_s), -1), np.ones(len(start_s), dtype=np.int64)])
    order = np.lexsort((change, times))  # who ends goes before who starts
    count, lasts_s = np.maximum(np.cumsum(change[order])[:-1], 0), np.diff(times[order])
    lasting_s = np.bincount(count, lasts_s, minlength=1)
    lasting_s[0] = 0.0
    that_many_s = np.cumsum(lasting_s[::-1])[::-1]
    return int(np.flatnonzero(that_many_s >= share * that_many_s[0])[-1]) if that_many_s[0] > 0 else 0


def check_enough(runs: Sequence[Run]) -> None:
    """Nothing, if there are requests enough to fit to and to hold out.

    Raises:
        InputError: There are too few.
    """
    fit = sum(int((run.fit & np.isfinite(run.seconds["jct"])).sum()) for run in runs)
    if fit < MIN_REQUESTS:
        raise InputError(
            f"a calibration needs {MIN_REQUESTS} finished requests or more to fit to; there are {fit}. Measure more, "
            "or hold out less"
        )
    held = sum(int((run.validation & np.isfinite(run.seconds["jct"])).sum()) for run in runs)
    if held < MIN_REQUESTS // 5:
        raise InputError(
            f"a calibration needs {MIN_REQUESTS // 5} finished requests or more to report on; {held} are held out. "
            "Measure more, or hold out more"
        )


def origin_notes(
    found: Calibration, runs: Sequence[Run], deployment: Deployment, allow: Collection[str]
) -> tuple[str, ...]:
    """What a reader must know of whether the runs are of the deployment at all.

    Raises:
        InputError: Nothing tells so, tables were moved far, simulations are far off all the same, and doubts are not
            allowed. Where runs tell that they are of it, tables may well lack a cost that no factor stands for.
    """
    untold = untold_origin([run.measured for run in runs], [run.name for run in runs], deployment)
    if found.warning and untold and "warnings" not in allow:
        raise InputError(
            f"runs must be of the deployment that they are calibrated to, and these hardly are: the calibration "
            f"{found.warning}; and {untold}. Give the model, GPU, degrees and limits of the engine that was measured; if "
            "these are right, take the tables all the same (--allow-doubts)"
        )
    doubt = f"not to be trusted far: the calibration {found.warning}" if found.warning else ""
    return tuple(note for note in (doubt, untold) if note)


MULTIPLE = 3
"""Loads of which whole ones are held out: the least and the most stay."""


@dataclass(frozen=True)
class Split:
    """All runs, how they were parted in words, and what a reader must know of that."""

    runs: tuple[Run, ...]
    words: str
    notes: tuple[str, ...] = ()

    @property
    def fit_result(self) -> list[Run]:
        """Those with requests that are fitted to."""
        return [run for run in self.runs if run.fit.any()]

    @property
    def validation(self) -> list[Run]:
        """Those with requests that are held out."""
        return [run for run in self.runs if run.validation.any()]


def split_of(
    runs: Sequence[Measured], deployment: Deployment, holdout: float | Sequence[Measured], allow: Collection[str]
) -> Split:
    """Runs that are held out were given, or are whole loads between the least and the most, or the last requests.

    Repeats (runs of equal requests) go to one side together.

    Raises:
        InputError: There is nothing to fit or to hold out, or a run cannot be taken.
    """
    given = list(holdout) if isinstance(holdout, Sequence) else []
    share = float(holdout) if isinstance(holdout, float | int) else 0.0
    if not runs or (not given and not 0 < share < 1):
        raise InputError(
            "a calibration needs one run or more, and something to hold out: a share above 0 and below 1, or runs; "
            f"there are {len(runs)} runs, and holdout is {share}"
        )
    every = [*runs, *given]
    names = _run_names(every)
    check_runs(every, names, deployment, allow)
    check_different(every, names)
    shares, words = _shares(runs, given, names, share)
    each = zip(every, names, shares, strict=True)
    notes = (*(_repeats(every, names, len(runs)) if given else ()), *_late(every, names))
    return Split(tuple(run_of(measured, name, part) for measured, name, part in each), words, notes)


def _late(every: Sequence[Measured], names: Sequence[str]) -> tuple[str, ...]:
    """What is told of a late client and yet is no reason to refuse its run."""
    return tuple(
        f"{name}: {doubt}; without it TTFT's mean and 95th percentile would be {lateness_moves(run):.1%} shorter at "
        "most, which no fit can feel, so the run was taken"
        for run, name in zip(every, names, strict=True)
        for doubt in harmless_lateness(run)
    )


def _shares(
    runs: Sequence[Measured], given: Sequence[Measured], names: Sequence[str], share: float
) -> tuple[list[float], str]:
    """How much of each run is held out, and that in words."""
    if given:
        words = f"fitted to {_counted(len(runs))}, held out {_counted(len(given))}"
        return [0.0] * len(runs) + [1.0] * len(given), words
    loads = _loads(runs)
    if len(loads) >= MULTIPLE:
        away = _middle(runs, loads, share)
        held = ", ".join(names[r] for r in sorted(away))
        words = f"fitted to {_counted(len(runs) - len(away))}, held out {held}"
        return [1.0 if r in away else 0.0 for r in range(len(runs))], words
    words = (
        f"fitted to the first {1 - share:.0%} of the requests{' of each run' if len(runs) > 1 else ''}, held out "
        "the last ones, which were simulated in the same queue"
    )
    return [share] * len(runs), words


def _counted(n: int) -> str:
    return f"{n} run{'s' if n > 1 else ''}"


def _run_names(runs: Sequence[Measured]) -> list[str]:
    """A name for each run; equal ones are numbered."""
    given = [measured.records.name or measured.workload.name or "run" for measured in runs]
    return [name if given.count(name) == 1 else f"{name} {i + 1}" for i, name in enumerate(given)]


def _requests(measured: Measured) -> tuple[object, ...]:
    """What repeats of a run have in common: lengths asked for, gaps between arrivals (to 1 ms), concurrency."""
    w = measured.workload
    arrival_s = np.round(w.arrival_s - np.min(w.arrival_s, initial=np.inf), 3)
    return w.prompt_tokens.tobytes(), w.output_tokens.tobytes(), arrival_s.tobytes(), w.concurrency


def _loads(runs: Sequence[Measured]) -> list[list[int]]:
    """The runs in groups of equal requests, in the order of the first ones."""
    found: dict[tuple[object, ...], list[int]] = {}
    for r, measured in enumerate(runs):
        found.setdefault(_requests(measured), []).append(r)
    return list(found.values())


def _middle(runs: Sequence[Measured], loads: Sequence[Sequence[int]], share: float) -> set[int]:
    """Which runs to hold out: spread over the loads with all their repeats, but neither the least nor the most."""
    order = sorted(loads, key=lambda own: (float(np.mean([_load(runs[r]) for r in own])), own[0]))
    inner = order[1:-1]
    count = min(len(inner), max(1, round(share * len(loads))))
    return {r for i in range(count) for r in inner[(2 * i + 1) * len(inner) // (2 * count)]}


def _load(measured: Measured) -> float:
    r = measured.records.requests
    span = float(np.nanmax(r.finished_s) - np.nanmin(r.arrival_s))
    return float(np.nansum(r.finished_s - r.arrival_s)) / max(span, 1e-9)


def _repeats(every: Sequence[Measured], names: Sequence[str], fit_result: int) -> tuple[str, ...]:
    """A note on each run that is held out although the same requests were fitted to."""
    known = {_requests(measured): name for measured, name in zip(every[:fit_result], names, strict=False)}
    return tuple(
        f"{name} is a repeat of a run that was fitted ({known[key]}): it tells noise, not a new load"
        for measured, name in zip(every[fit_result:], names[fit_result:], strict=True)
        for key in (_requests(measured),)
        if key in known
    )
