"""What something else would bring: more GPUs, fewer, a faster disk; planned anew, told on the same draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lengthwise.apps.plan.evaluate import mean_of
from lengthwise.apps.plan.planner import Asked, plan
from lengthwise.apps.plan.space import Served
from lengthwise.apps.plan.switching import SwitchTimes
from lengthwise.schema.app import AppPlan, AppWhatIf, Cluster, Machine
from lengthwise.schema.app_tasks import TaskDraw, Tasks
from lengthwise.schema.errors import DoesNotFitError


def what_if(
    tasks: Tasks,
    draws: Sequence[TaskDraw],
    models: Sequence[Served],
    cluster: Cluster,
    told: AppPlan,
    *,
    true_draws: Sequence[TaskDraw] = (),
    times: SwitchTimes | None = None,
    asked: Asked | None = None,
) -> tuple[AppWhatIf, ...]:
    """The makespan with an island of GPUs more, one fewer, a GPU more, and a disk twice as fast, each planned anew.

    The plan as it is stays among what is looked at, where it fits: more GPUs do not make it later. A variant under
    which a model does not fit any more is left out. Arguments are those of ``plan``, and ``told`` is what it said.
    """
    times = times or SwitchTimes()
    asked = replace(asked or Asked(), method=told.method, beside=(), known=(told.planned,))
    variants = [(name, other, times) for name, other in _clusters(cluster)]
    variants.append(("disk_twice_as_fast", cluster, faster_disk(times, 2.0)))
    found = []
    for name, gpus, switching in variants:
        try:
            then = plan(tasks, draws, models, gpus, true_draws=true_draws, times=switching, asked=asked)
        except DoesNotFitError:
            continue
        apart = [b - a for a, b in zip(told.makespans_s, then.makespans_s, strict=True)]
        found.append(AppWhatIf(name, then.makespan, mean_of(apart)))
    return tuple(found)


def _clusters(cluster: Cluster) -> list[tuple[str, Cluster]]:
    """The last machine with an island of GPUs more and one fewer; one GPU more, there or in a machine of its own."""
    *others, last = cluster.machines
    step = min(last.node.link_group, last.gpus)
    found = [(_name("plus", step, last), _sized((*others, _with(last, last.gpus + step))))]
    if step > 1:
        found.append(("gpus_plus_1", _one_more(cluster)))
    if cluster.gpus > step:
        found.append((_name("minus", step, last), _sized((*others, _with(last, last.gpus - step)))))
    return found


def _name(way: str, step: int, machine: Machine) -> str:
    """GPUs that are an island are called so."""
    is_island = 1 < step == machine.node.link_group
    return f"{'island' if is_island else 'gpus'}_{way}_{step}"


def _one_more(cluster: Cluster) -> Cluster:
    *others, last = cluster.machines
    if last.gpus < last.node.gpus:
        return Cluster((*others, _with(last, last.gpus + 1)))
    return Cluster((*cluster.machines, Machine(last.gpu, last.node, 1)))


def _sized(machines: Sequence[Machine]) -> Cluster:
    return Cluster(tuple(machine for machine in machines if machine.gpus))


def _with(machine: Machine, gpus: int) -> Machine:
    return replace(machine, gpus=gpus, node=replace(machine.node, gpus=max(gpus, machine.node.gpus)))


def faster_disk(times: SwitchTimes, factor: float) -> SwitchTimes:
    """Switch times with a disk so many times as fast; measured starts keep what an engine itself is assumed to take."""
    own_s = times.rates.engine_start_s
    measured = {
        key: min(own_s, s) + max(0.0, s - own_s) / factor if key[-1] == "start" else s
        for key, s in times.measured.items()
    }
    rates = replace(times.rates, disk_bytes_per_s=times.rates.disk_bytes_per_s * factor)
    return replace(times, measured=measured, rates=rates)
