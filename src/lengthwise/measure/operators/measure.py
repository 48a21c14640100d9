"""Measures a model's operators and collectives on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lengthwise.measure.operators import device as hardware
from lengthwise.measure.operators.bench import Outcome, TorchBench
from lengthwise.measure.operators.campaign import Campaign, Journal, OperatorLine, Plan, as_profile, notes, table
from lengthwise.measure.operators.device import Device
from lengthwise.measure.operators.kernels import HOST_NOTE
from lengthwise.measure.operators.points import MESSAGE, Operator, Point, Reach, operators_of, unmeasured
from lengthwise.schema.errors import InputError
from lengthwise.schema.profile import Profile, ProfileFacts
from lengthwise.schema.specs import ModelSpec

_BUSY = 0.5
_DECODE_NOTE = (
    "decode attention reads dense keys and values, each sequence's in one piece and in place, heads that share keys "
    "as queries of one head; engines read blocks of a paged cache through a table, for which torch has no kernel, so "
    "that they may take longer. A skew is one long context beside equal short ones"
)


def profile_notes(device: Device, tp: Sequence[int], groups: Sequence[int], model: ModelSpec) -> tuple[str, ...]:
    """Return notes on what was measured and how. ``groups`` has the numbers of devices of measured collectives."""
    found = [*unmeasured(model), HOST_NOTE, _DECODE_NOTE]
    if max(tp) == 1:
        found.append("all-reduce and send were not measured: no TP degree above 1 was requested")
    elif device.kind == "cpu":
        found.append("all-reduce and send are between two processes of this machine, by gloo")
    elif missing := ", ".join(str(n) for n in sorted(set(tp)) if n > 1 and n not in groups):
        found.append(f"all-reduce and send over {missing} GPUs were not measured: this machine has fewer")
    if max(tp) > 1:
        found.append("logits gather was not measured")
    if device.kind == "cpu" and device.dtype == "bfloat16" and hardware.emulates_bfloat16():
        found.append("this processor has no bfloat16: torch converts, which takes far longer")
    if device.kind == "cpu" and (load := hardware.cpu_load()) > _BUSY:
        found.append(f"the cores were busy: {load:.1f} runnable processes a core in the last minute, this one included")
    return tuple(found)


SIZES_BYTES = tuple(4**n for n in range(5, 14))
_REPEATS = 7
_WORKER = "lengthwise.measure.operators.collective_worker"


def collective_operators(gpus: int) -> tuple[Operator, ...]:
    """Return the collectives over ``gpus`` devices. They do not depend on a model."""
    shape = {"gpus": gpus}
    return tuple(Operator(name, MESSAGE, (0,), (SIZES_BYTES[-1],), 1.0, shape) for name in ("all-reduce", "send"))


def measure_collectives(
    torch: Any, device: str, gpus: int, *, limit_s: float, sizes_bytes: Sequence[int] = SIZES_BYTES
) -> tuple[list[Outcome], str]:
    """Measure all-reduce and send over ``gpus`` devices.

    Return the outcomes, and the reason why some are missing. The reason is "" if none is missing.
    """
    if device == "cuda" and torch.cuda.device_count() < gpus:
        return [], f"collectives over {gpus} GPUs were not measured: this machine has {torch.cuda.device_count()}"
    backend = "nccl" if device == "cuda" else "gloo"
    if not torch.distributed.is_available() or not getattr(torch.distributed, f"is_{backend}_available")():
        return [], f"collectives were not measured: this torch has no {backend}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if backend == "gloo":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform.startswith("linux") else "lo0")
    with tempfile.TemporaryDirectory() as folder:  # a process per device, killed after the limit
        settings = {"world": gpus, "backend": backend, "meet": str(Path(folder, "meet")), "repeats": _REPEATS}
        settings |= {"timeout_s": limit_s, "bytes": list(sizes_bytes)}
        out, err = Path(folder, "out"), Path(folder, "err")
        with out.open("wb") as out_file, err.open("wb") as err_file:
            streams: dict[str, Any] = {"env": environment, "stdin": subprocess.DEVNULL, "stderr": err_file}
            commands = [[sys.executable, "-m", _WORKER, json.dumps(settings | {"rank": n})] for n in range(gpus)]
            outputs: list[Any] = [out_file, *[subprocess.DEVNULL] * (gpus - 1)]
            pairs = zip(commands, outputs, strict=True)
            workers = [subprocess.Popen(command, stdout=output, **streams) for command, output in pairs]  # noqa: S603
            reason = _wait(workers, limit_s)
        complete = [line for line in out.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        errors = err.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if reason == "failed" and errors:
        reason = errors[-1][:200]
    by_name = {one.name: one for one in collective_operators(gpus)}
    outcomes = [
        Outcome(Point(by_name[line["operator"]], (line["bytes"],)), tuple(line["seconds"]), (), backend)
        for line in map(json.loads, complete)
    ]
    return outcomes, f"collectives over {gpus} devices are not complete: {reason}" if reason else ""


def _wait(workers: list[subprocess.Popen[bytes]], limit_s: float) -> str:
    until_s = time.monotonic() + limit_s
    try:
        while any(worker.poll() is None for worker in workers):
            if any(worker.poll() not in {None, 0} for worker in workers):
                return "failed"
            if time.monotonic() > until_s:
                return f"they took more than {limit_s:.0f} s"
            time.sleep(0.05)
        return "failed" if any(worker.returncode for worker in workers) else ""
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
            worker.wait()


REACHES = {
    "cpu": Reach(tokens=2048, seqs=64, context=4096, kv_tokens=1 << 16),
    "cuda": Reach(tokens=16384, seqs=512, context=32768, kv_tokens=1 << 21),
}
_COLLECTIVES_SHARE, _MIN_COLLECTIVES_S, _MAX_COLLECTIVES_S = 0.2, 20.0, 90.0


@dataclass(frozen=True)
class Measurement:
    """A profile, the quality of each operator's measurements, and the error if the device failed (``lost``)."""

    profile: Profile
    lines: tuple[OperatorLine, ...]
    lost: str = ""


@dataclass(frozen=True)
class MeasurementSettings:
    """Device, dtype and TP degrees of a measurement of operators, and its largest sizes."""

    device: str = "auto"  # "cpu", "cuda", or "auto": a GPU if there is one
    dtype: str = "auto"  # "bfloat16", "float16", "float32", or "auto": float32 on a CPU, the model's on a GPU
    tp: Sequence[int] = (1,)  # tensor-parallel degrees whose shards are measured, all on the one device
    threads: int | None = None  # threads of a CPU; None: all cores
    # Tokens and sequences of the largest step, and tokens of the longest request; None: the device's in REACHES.
    max_tokens: int | None = None
    max_seqs: int | None = None
    max_context: int | None = None
    seed: int = 0  # seed of the tensors' values


def measure_operators(
    model: ModelSpec,
    settings: MeasurementSettings = MeasurementSettings(),
    *,
    budget_s: float = 300.0,
    target: float = 0.03,
    resume: Path | str | None = None,
    progress: Callable[[float, float, str], None] = lambda *_: None,
) -> Measurement:
    """Measure a model's operators on this machine's device.

    Args:
        budget_s: Total seconds, including those of an interrupted run.
        target: Stop early when predictions of each point from the other points have this relative error or less.
        resume: File that stores each point immediately, and from which an interrupted measurement continues.
        progress: Receives the seconds spent, the budget in seconds, and the name of the current operator.

    Raises:
        InputError: This machine lacks the device or the dtype, a TP degree does not divide the attention heads, or the
            budget does not suffice for a coarse grid.
        ProfileError: The file ``resume`` has points of another measurement.
    """
    started = time.perf_counter()
    torch = hardware.torch_module()
    where, tp = hardware.choose_device(torch, model, settings.device, settings.dtype, settings.threads), settings.tp
    if budget_s <= 0:
        raise InputError(f"the budget must be above 0 s; it is {budget_s:g}")
    reach = _reach(model, where, settings)
    operators = operators_of(model, tp, reach)
    degrees = sorted({n for n in tp if n > 1})
    groups = [n for n in degrees if n <= torch.cuda.device_count()]
    if where.kind == "cpu":  # between two processes, whatever the degrees
        groups = [2] if degrees else []
    name = hardware.device_name(torch, where)
    identity = {  # points of two runs belong together if these agree
        "model": model.name,
        "shapes": hashlib.sha256(repr(model).encode()).hexdigest()[:12],
        "device": name,
        "dtype": where.dtype,
        "threads": where.threads,
        "tp": sorted(set(tp)),
        "reach": asdict(reach),
        "seed": settings.seed,
        "torch": str(torch.__version__),
    }
    every = (*operators, *(one for gpus in groups for one in collective_operators(gpus)))
    journal = Journal(None if resume is None else Path(resume), identity, every)
    missing: list[str] = []
    before = torch.get_num_threads()
    torch.set_num_threads(where.threads)
    try:
        plan = Plan(operators, budget_s - (time.perf_counter() - started), target=target)
        bench = TorchBench(torch, model, where, settings.seed)
        campaign = Campaign(plan, bench, journal, time.perf_counter, progress)
        for gpus in groups:
            if {one.key for one in collective_operators(gpus)} <= {key for key, *_ in campaign.outcomes}:
                continue  # an interrupted run measured them
            limit_s = min(max(_COLLECTIVES_SHARE * budget_s, _MIN_COLLECTIVES_S), _MAX_COLLECTIVES_S)
            found, reason = measure_collectives(torch, where.kind, gpus, limit_s=limit_s)
            campaign.add_outcomes([one for one in found if one.point.key not in campaign.outcomes])
            missing += [reason] if reason else []
        outcomes = campaign.run()
        if all(outcome.skipped for outcome in outcomes):
            raise InputError(f"no point could be measured: {outcomes[0].skipped if outcomes else 'there are none'}")
    finally:
        torch.set_num_threads(before)
    if campaign.lost:
        missing.append(f"the device failed, so that points are missing: {campaign.lost}")
    metadata = ProfileFacts(
        name=f"{model.name} on {name}, {where.dtype}",
        source="lengthwise",
        gpu=name,
        model=model.name,
        engine=f"torch {torch.__version__}",
        measured=datetime.now(UTC).date().isoformat(),
        machine=hardware.machine_properties(torch, where),
        notes=(*missing, *profile_notes(where, tp, groups, model), *notes(outcomes)),
    )
    return Measurement(as_profile(outcomes, metadata, where.dtype), table(outcomes), campaign.lost)


def require_measurable(model: ModelSpec, settings: MeasurementSettings) -> None:
    """Raise the errors that ``measure_operators`` raises for these settings, before any file is written."""
    where = hardware.choose_device(hardware.torch_module(), model, settings.device, settings.dtype, settings.threads)
    operators_of(model, settings.tp, _reach(model, where, settings))


def _reach(model: ModelSpec, where: Device, settings: MeasurementSettings) -> Reach:
    default = REACHES[where.kind]
    for name in ("max_tokens", "max_seqs", "max_context"):
        if (value := getattr(settings, name)) is not None and value < 1:
            raise InputError(f"{name} must be at least 1; it is {value}")
    context = min(settings.max_context or default.context, model.max_model_len)
    seqs = settings.max_seqs or default.seqs
    kv_tokens = min(max(default.kv_tokens, context), seqs * context)
    return Reach(settings.max_tokens or default.tokens, seqs, context, kv_tokens)
