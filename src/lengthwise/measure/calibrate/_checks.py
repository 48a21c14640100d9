"""What cannot be calibrated to is refused, with a reason."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from lengthwise.measure._prefix_cache import prefix_doubts
from lengthwise.measure.calibrate._lateness import harmless_lateness
from lengthwise.measure.calibrate._origin import doubts_of_origin, untold_origin
from lengthwise.measure.calibrate._runs import Run
from lengthwise.measure.calibrate.answer import Calibration
from lengthwise.metrics.clocks import clock_doubt
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError
from lengthwise.schema.measured import Measured
from lengthwise.schema.records import RequestRecords, Status

LEAST_REQUESTS = 50
ALLOWED = ("doubts", "simulated")
CLOCK_SLACK = 1.02
BRIEFLY = 0.05
"""Share of a run in which more may seem to run than do: what a client reads late seems to run on."""
PROMPT_SLACK = 0.02


def check_runs(
    runs: Sequence[Measured], names: Sequence[str], deployment: Deployment, allow: Collection[str]
) -> None:
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
    told = {name: _doubts(run, deployment) for run, name in zip(runs, names, strict=True)}
    doubted = {name: doubts for name, doubts in told.items() if doubts}
    if doubted and "doubts" not in allow:
        raise InputError(_doubted(doubted, len(runs)))
    for run, name in zip(runs, names, strict=True):
        _check_lengths(run, name, deployment)
        _check_running(run.records.requests, name, deployment)
        _check_first_tokens(run.records.requests, name)


def _doubts(measured: Measured, deployment: Deployment) -> list[str]:
    failed = (f"{n} requests failed of {why}" for why, n in measured.errors.items())
    clock = clock_doubt(measured.records.requests, measured.records.end_s)
    harmless = harmless_lateness(measured)
    own = (doubt for doubt in measured.doubts if doubt not in harmless)
    about = [*prefix_doubts(measured), *doubts_of_origin(measured, deployment)]
    return [*own, *failed, *([clock] if clock else []), *about]


def _doubted(told: Mapping[str, Sequence[str]], of: int) -> str:
    """One sentence on one doubtful run; of several a line each."""
    if len(told) == 1:
        ((name, doubts),) = told.items()
        return (
            f"{name} must be a run that can be trusted; of this one it is told: {'; '.join(doubts)}. "
            "Measure again, or allow it (--allow-doubts)"
        )
    lines = "".join(f"\n  {name}: {'; '.join(doubts)}" for name, doubts in told.items())
    return (
        f"runs must be such that can be trusted; of {len(told)} of {of} doubts are told. Measure these again, leave "
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
    if fit < LEAST_REQUESTS:
        raise InputError(
            f"a calibration needs {LEAST_REQUESTS} finished requests or more to fit to; there are {fit}. Measure more, "
            "or hold out less"
        )
    held = sum(int((run.held & np.isfinite(run.seconds["jct"])).sum()) for run in runs)
    if held < LEAST_REQUESTS // 5:
        raise InputError(
            f"a calibration needs {LEAST_REQUESTS // 5} finished requests or more to report on; {held} are held out. "
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
    if found.doubt and untold and "doubts" not in allow:
        raise InputError(
            f"runs must be of the deployment that they are calibrated to, and these hardly are: the calibration "
            f"{found.doubt}; and {untold}. Give the model, GPU, degrees and limits of the engine that was measured; if "
            "these are right, take the tables all the same (--allow-doubts)"
        )
    doubt = f"not to be trusted far: the calibration {found.doubt}" if found.doubt else ""
    return tuple(note for note in (doubt, untold) if note)
