"""Measures a model's operators on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lengthwise.measure.operators import _about, collectives
from lengthwise.measure.operators.bench import TorchBench
from lengthwise.measure.operators.campaign import Campaign, Plan
from lengthwise.measure.operators.device import Device, choose, torch_module
from lengthwise.measure.operators.journal import Journal
from lengthwise.measure.operators.points import Reach
from lengthwise.measure.operators.result import OperatorLine, as_profile, notes, table
from lengthwise.measure.operators.shapes import operators_of
from lengthwise.measure.operators.timing import Outcome
from lengthwise.schema.errors import InputError
from lengthwise.schema.model import ModelSpec
from lengthwise.schema.profile import Profile

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
    asked = _about.identity(torch, model, where, tp, reach, seed)
    every = (*operators, *(one for gpus in groups for one in collectives.operators(gpus)))
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
    facts = _about.facts(
        torch, model, where, (*said, *_about.said(where, tp, groups, model), *notes(outcomes))
    )
    return Measurement(as_profile(outcomes, facts, where.dtype), table(outcomes), campaign.lost)


def require_measurable(
    model: ModelSpec, *, device: str, dtype: str, tp: Sequence[int], threads: int | None = None
) -> None:
    """Nothing, if ``measure_operators`` takes these; raises as it does, before any file is touched."""
    torch = torch_module()
    where = choose(torch, model, device, dtype, threads)
    operators_of(model, tp, _reach(model, where, None, None, None))


def _require_some(outcomes: Sequence[Outcome]) -> None:
    if all(outcome.skipped for outcome in outcomes):
        raise InputError(
            f"no point could be measured: {outcomes[0].skipped if outcomes else 'there are none'}"
        )


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
        names = {one.key for one in collectives.operators(gpus)}
        if names <= {key for key, *_ in campaign.outcomes}:
            continue
        limit_s = min(max(_COLLECTIVES_SHARE * budget_s, _COLLECTIVES_LEAST_S), _COLLECTIVES_MOST_S)
        outcomes, why = collectives.measure(torch, where.kind, gpus, limit_s=limit_s)
        campaign.adopt([one for one in outcomes if one.point.key not in campaign.outcomes])
        said += [why] if why else []
    return tuple(said)
