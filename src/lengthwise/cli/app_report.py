"""What the pages of a plan and a run of an application say beside their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lengthwise.apps.run import recorded
from lengthwise.report.apps_text import AppFacts
from lengthwise.schema.app import Cluster, Machine
from lengthwise.usecases.app_plan import PlannedApp
from lengthwise.usecases.app_run import RanApp
from lengthwise.usecases.app_setup import AskedApp


def facts_of(requested: AskedApp, made: PlannedApp, name: str) -> AppFacts:
    """Of a plan."""
    cluster = made.space.cluster if made.space is not None else None
    return AppFacts(
        requested.app.name or name, tuple(_metadata(requested, made, cluster)), _gpus(cluster), _is_mixed(cluster)
    )


def facts_of_run(requested: AskedApp, made: PlannedApp, name: str, ran: RanApp) -> AppFacts:
    """Of a run: its manifest, and what was recorded of each model."""
    plan = facts_of(requested, replace(made, plan=ran.plan), name)
    answers, tokens = recorded(ran.folder)
    return replace(plan, manifest=ran.metadata, tokens=tokens, answers=answers)


def _metadata(requested: AskedApp, made: PlannedApp, cluster: Cluster | None) -> Iterator[str]:
    rows, tasks, models = len(requested.file.rows.rows), len(made.expanded.tasks), len(requested.app.models)
    yield f"{rows:,} rows"
    yield f"{tasks:,} tasks at most"
    yield f"{models} model{'s' if models != 1 else ''}"
    for machine in cluster.machines if cluster is not None else ():
        yield _machine(machine)
    if made.plan is not None:
        yield f"planned by {made.plan.method.replace('_', ' ')}"


def _machine(machine: Machine) -> str:
    group, gpus = machine.node.link_group, machine.gpus
    if gpus == 1:
        return f"1 x {machine.gpu.name}"
    some = {1: "no fast links", 2: "fast links in pairs"}
    links = "fast links between all" if group >= gpus else some.get(group, f"fast links between {group} each")
    return f"{gpus} x {machine.gpu.name}, {links}"


def _gpus(cluster: Cluster | None) -> tuple[str, ...]:
    if cluster is None:
        return ()
    if len(cluster.machines) == 1:
        return tuple(f"GPU {k}" for k in range(cluster.gpus))
    kind = [f" ({one.gpu.name})" if _is_mixed(cluster) else "" for one in cluster.machines]
    return tuple(f"node {n}, GPU {k}{kind[n]}" for n, one in enumerate(cluster.machines) for k in range(one.gpus))


def _is_mixed(cluster: Cluster | None) -> bool:
    return cluster is not None and len({machine.gpu.name for machine in cluster.machines}) > 1
