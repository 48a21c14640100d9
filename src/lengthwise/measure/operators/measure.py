"""Measures a model's operators on this machine."""

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

from lengthwise.measure.operators import device, kernels
from lengthwise.measure.operators.bench import Outcome, TorchBench
from lengthwise.measure.operators.campaign import Campaign, Journal, OperatorLine, Plan, as_profile, notes, table
from lengthwise.measure.operators.device import Device, choose, emulates_bfloat16, torch_module
from lengthwise.measure.operators.points import MESSAGE, Operator, Point, Reach, operators_of, unmeasured
from lengthwise.schema.errors import InputError
from lengthwise.schema.profile import Profile, ProfileFacts
from lengthwise.schema.specs import ModelSpec

_BUSY = 0.5
_DECODE_NOTE = (
    "decode attention reads dense keys and values, each sequence's in one piece and in place, heads that share keys "
    "as queries of one head; engines read blocks of a paged cache through a table, for which torch has no kernel, so "
    "that theirs may take longer. A skew is one long context beside equal short ones"
)


def profile_notes(where: Device, tp: Sequence[int], groups: Sequence[int], model: ModelSpec) -> tuple[str, ...]:
    """What every such measurement must tell; ``groups``: over how many devices collectives were measured."""
    told = [*unmeasured(model), kernels.HOST_NOTE, _DECODE_NOTE]
    if max(tp) == 1:
        told.append("all-reduce and send were not measured: no TP degree above 1 was asked for")
    elif where.kind == "cpu":
        told.append("all-reduce and send are between two processes of this machine, by gloo")
    elif missing := ", ".join(str(n) for n in sorted(set(tp)) if n > 1 and n not in groups):
        told.append(f"all-reduce and send over {missing} GPUs were not measured: this machine has fewer")
    if max(tp) > 1:
        told.append("logits gather was not measured")
    if where.kind == "cpu" and where.dtype == "bfloat16" and emulates_bfloat16():
        told.append("this processor has no bfloat16: torch converts, which takes far longer")
    if device.cpu_load() > _BUSY and where.kind == "cpu":
        told.append(
            f"other processes wanted the cores: {device.cpu_load():.1f} a core in the last minute, ours included"
        )
    return tuple(told)


def profile_identity(
    torch: Any, model: ModelSpec, where: Device, tp: Sequence[int], reach: Reach, seed: int
) -> dict[str, Any]:
    """What points of two runs must share to belong together."""
    return {
        "model": model.name,
        "shapes": hashlib.sha256(repr(model).encode()).hexdigest()[:12],
        "device": device.device_name(torch, where),
        "dtype": where.dtype,
        "threads": where.threads,
        "tp": sorted(set(tp)),
        "reach": asdict(reach),
        "seed": seed,
        "torch": str(torch.__version__),
    }


def profile_facts(torch: Any, model: ModelSpec, where: Device, notes: tuple[str, ...]) -> ProfileFacts:
    """Where a profile comes from."""
    name = device.device_name(torch, where)
    return ProfileFacts(
        name=f"{model.name} on {name}, {where.dtype}",
        source="lengthwise",
        gpu=name,
        model=model.name,
        engine=f"torch {torch.__version__}",
        measured=datetime.now(UTC).date().isoformat(),
        machine=device.machine_facts(torch, where),
        notes=notes,
    )


SIZES_BYTES = tuple(4**n for n in range(5, 14))
_REPEATS = 7
_WORKER = "lengthwise.measure.operators._collective_worker"


def collective_operators(gpus: int) -> tuple[Operator, ...]:
    """The collectives over so many devices; kernels of no model."""
    shape = {"gpus": gpus}
    return tuple(Operator(name, MESSAGE, (0,), (SIZES_BYTES[-1],), 1.0, shape) for name in ("all-reduce", "send"))


def measure_collectives(
    torch: Any, device: str, gpus: int, *, limit_s: float, sizes_bytes: Sequence[int] = SIZES_BYTES
) -> tuple[list[Outcome], str]:
    """Outcomes of all-reduce and send over ``gpus`` devices, and why there are none or fewer ("": all there).

    Processes are started for it and ended after ``limit_s`` at the latest.
    """
    if device == "cuda" and torch.cuda.device_count() < gpus:
        return ([], f"collectives over {gpus} GPUs were not measured: this machine has {torch.cuda.device_count()}")
    backend = "nccl" if device == "cuda" else "gloo"
    if not torch.distributed.is_available() or not getattr(torch.distributed, f"is_{backend}_available")():
        return [], f"collectives were not measured: this torch has no {backend}"
    lines, why = _run(backend, gpus, limit_s, sizes_bytes)
    by_name = {one.name: one for one in collective_operators(gpus)}
    outcomes = [
        Outcome(Point(by_name[line["operator"]], (line["bytes"],)), tuple(line["seconds"]), (), backend)
        for line in lines
    ]
    return outcomes, f"collectives over {gpus} devices are not complete: {why}" if why else ""


def _run(backend: str, world: int, limit_s: float, sizes_bytes: Sequence[int]) -> tuple[list[dict[str, Any]], str]:
    """What rank 0 printed until it ended or was ended, and what went wrong."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if backend == "gloo":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform.startswith("linux") else "lo0")
    with tempfile.TemporaryDirectory() as folder:
        asked = {"world": world, "backend": backend, "meet": str(Path(folder, "meet")), "repeats": _REPEATS}
        asked |= {"timeout_s": limit_s, "bytes": list(sizes_bytes)}
        out, err = Path(folder, "out"), Path(folder, "err")
        with out.open("wb") as out_file, err.open("wb") as err_file:
            workers = [
                subprocess.Popen(  # noqa: S603 - this very package
                    [sys.executable, "-m", _WORKER, json.dumps({**asked, "rank": rank})],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out_file if rank == 0 else subprocess.DEVNULL,
                    stderr=err_file,
                )
                for rank in range(world)
            ]
            why = _finished(workers, limit_s)
        lines = out.read_bytes().splitlines(keepends=True)
        told = err.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if why == "failed" and told:
        why = told[-1][:200]
    return [json.loads(line) for line in lines if line.endswith(b"\n")], why


def _finished(workers: list[subprocess.Popen[bytes]], limit_s: float) -> str:
    """Waits for all; "" if they ended well. None is left running."""
    until = time.monotonic() + limit_s
    try:
        while any(worker.poll() is None for worker in workers):
            if any(worker.poll() not in {None, 0} for worker in workers):
                return "failed"
            if time.monotonic() > until:
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
_COLLECTIVES_SHARE, _COLLECTIVES_LEAST_S, _COLLECTIVES_MOST_S = 0.2, 20.0, 90.0


@dataclass(frozen=True)
class Measurement:
    """A profile and, operator by operator, what it is worth; ``lost``: why the device ended it early."""

    profile: Profile
    lines: tuple[OperatorLine, ...]
    lost: str = ""


def measure_profile(model: ModelSpec, **settings: Any) -> Profile:
    """The profile of a model's operators on this machine; ``measure_operators`` tells the settings."""
    return measure_operators(model, **settings).profile


def measure_operators(
    model: ModelSpec,
    *,
    device: str = "auto",
    dtype: str = "auto",
    tp: Sequence[int] = (1,),
    budget_s: float = 300.0,
    max_tokens: int | None = None,
    max_seqs: int | None = None,
    max_context: int | None = None,
    seed: int = 0,
    threads: int | None = None,
    target: float = 0.03,
    resume: Path | str | None = None,
    progress: Callable[[float, float, str], None] = lambda *_: None,
) -> Measurement:
    """The profile of a model's operators on this machine's device, and what it is worth.

    Args:
        model: Whose shapes.
        device: "cpu", "cuda", or "auto": a GPU where there is one.
        dtype: "bfloat16", "float16", "float32", or "auto": float32 on a CPU, the model's on a GPU.
        tp: Tensor-parallel degrees whose shards are measured, all on the one device.
        budget_s: Seconds in all, with those of an interrupted run before.
        max_tokens: Largest step; None: 2,048 on a CPU, 16,384 on a GPU.
        max_seqs: Most sequences of a step; None: 64 or 512.
        max_context: Longest request; None: 4,096 or 32,768; never more than the model's own.
        seed: Of what tensors hold.
        threads: Of a CPU; None: all cores.
        target: Relative error, of points told by the others, at which to stop early.
        resume: A file that points go to as they come; one that is there is gone on with.
        progress: Told seconds spent, the budget, and what is being measured.

    Raises:
        MissingExtraError: torch is not installed.
        InputError: No such device here, a dtype that it lacks, a degree that does not divide the heads, a
            budget that does not suffice for a coarse grid.
        ProfileError: ``resume`` holds points of another measurement.
    """
    started = time.perf_counter()
    torch = torch_module()
    where = choose(torch, model, device, dtype, threads)
    if budget_s <= 0:
        raise InputError(f"the budget must be above 0 s; it is {budget_s:g}")
    reach = _reach(model, where, max_tokens, max_seqs, max_context)
    operators = operators_of(model, tp, reach)
    groups = _groups(torch, where, tp)
    asked = profile_identity(torch, model, where, tp, reach, seed)
    every = (*operators, *(one for gpus in groups for one in collective_operators(gpus)))
    journal = Journal(None if resume is None else Path(resume), asked, every)
    before = torch.get_num_threads()
    torch.set_num_threads(where.threads)
    try:
        plan = Plan(operators, budget_s - (time.perf_counter() - started), target=target)
        bench = TorchBench(torch, model, where, seed)
        campaign = Campaign(plan, bench, journal, time.perf_counter, progress)
        said = _collectives(torch, where, groups, campaign, budget_s)
        outcomes = campaign.run()
        _require_some(outcomes)
    finally:
        torch.set_num_threads(before)
    if campaign.lost:
        said = (*said, f"the device failed, so that points are missing: {campaign.lost}")
    metadata = profile_facts(torch, model, where, (*said, *profile_notes(where, tp, groups, model), *notes(outcomes)))
    return Measurement(as_profile(outcomes, metadata, where.dtype), table(outcomes), campaign.lost)


def require_measurable(
    model: ModelSpec, *, device: str, dtype: str, tp: Sequence[int], threads: int | None = None
) -> None:
    """Nothing, if ``measure_operators`` takes these; raises as it does, before any file is touched."""
    torch = torch_module()
    where = choose(torch, model, device, dtype, threads)
    operators_of(model, tp, _reach(model, where, None, None, None))


def _require_some(outcomes: Sequence[Outcome]) -> None:
    if all(outcome.skipped for outcome in outcomes):
        raise InputError(f"no point could be measured: {outcomes[0].skipped if outcomes else 'there are none'}")


def _reach(
    model: ModelSpec, where: Device, max_tokens: int | None, max_seqs: int | None, max_context: int | None
) -> Reach:
    usual = REACHES[where.kind]
    for name, value in (("max_tokens", max_tokens), ("max_seqs", max_seqs), ("max_context", max_context)):
        if value is not None and value < 1:
            raise InputError(f"{name} must be at least 1; it is {value}")
    context = min(max_context or usual.context, model.max_model_len)
    seqs = max_seqs or usual.seqs
    kv_tokens = min(max(usual.kv_tokens, context), seqs * context)
    return Reach(max_tokens or usual.tokens, seqs, context, kv_tokens)


def _groups(torch: Any, where: Device, tp: Sequence[int]) -> tuple[int, ...]:
    """Over how many devices collectives are measured: of a CPU two processes, however many were asked for."""
    wanted = sorted({n for n in tp if n > 1})
    if where.kind == "cpu":
        return (2,) if wanted else ()
    return tuple(n for n in wanted if n <= torch.cuda.device_count())


def _collectives(
    torch: Any, where: Device, groups: Sequence[int], campaign: Campaign, budget_s: float
) -> tuple[str, ...]:
    """Measures what no run before has measured; why something is missing."""
    said = []
    for gpus in groups:
        names = {one.key for one in collective_operators(gpus)}
        if names <= {key for key, *_ in campaign.outcomes}:
            continue
        limit_s = min(max(_COLLECTIVES_SHARE * budget_s, _COLLECTIVES_LEAST_S), _COLLECTIVES_MOST_S)
        outcomes, why = measure_collectives(torch, where.kind, gpus, limit_s=limit_s)
        campaign.adopt([one for one in outcomes if one.point.key not in campaign.outcomes])
        said += [why] if why else []
    return tuple(said)
