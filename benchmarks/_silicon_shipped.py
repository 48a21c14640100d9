"""The measured deployments by what ships: ``deploy``, its cost sources, its hosts and the engine, nothing of here.

No waits by settings, no factors, and the front before the engine is the host's own: a load and an engine's flags as
its scripts give them, through ``lengthwise.engine.deployment_builder`` and ``simulate`` as anyone may call them. Attention data
parallelism and experts cut otherwise than by tensor parallelism have no setting there; those points are left out and
counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from _silicon_loop import Loop, loop_of, means, workload
from _silicon_rows import Point
from _silicon_steps import kv_dtype
from _silicon_tables import ROOT, VERSION

from lengthwise import catalog
from lengthwise.cost import HostOverhead
from lengthwise.cost.estimators import fit_profile
from lengthwise.cost.profiles import import_aiconfigurator
from lengthwise.engine import deploy, simulate
from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.deployment import Deployment, EngineLimits, Parallelism
from lengthwise.schema.errors import InputError
from lengthwise.schema.profile import Profile

Message = dict[str, tuple[float, float]]
"""(mean TTFT, mean TPOT) in seconds by host: "engine", "default" and "unseen"."""
HOSTS = ("engine", "default", "unseen")
Group = tuple[object, ...]

WHY_NOT = "attention data parallelism, or experts not cut by tensor parallelism: no setting ships"
NO_ROOM = "does not fit by the memory planner that ships"


def is_expressible(point: Point) -> bool:
    """Whether ``deploy`` has settings for how the point's model was cut."""
    cut_by_tp = point.model.startswith("llama") or (point.ep == 1 and point.moe_tp == point.tp)
    return point.dp == 1 and cut_by_tp


def by_roofline(
    points: Sequence[Point], unseen: Callable[[Point], HostOverhead]
) -> tuple[list[tuple[Point, Message]], dict[str, int]]:
    """(points with what was said of them, points left out by reason), ``cost="roofline"``.

    Args:
        points: To predict.
        unseen: The seconds of a host that no point of this model or GPU has shaped.
    """
    mine = [point for point in points if is_expressible(point)]
    kept = [(point, said) for point in mine if (said := _message(point, "roofline", unseen(point)))]
    return kept, {WHY_NOT: len(points) - len(mine), NO_ROOM: len(mine) - len(kept)}


def by_profiles(
    points: Sequence[Point], unseen: Callable[[Point], HostOverhead], shared: Path, most: int | None = None
) -> tuple[list[tuple[Point, Message]], int]:
    """(points with what was said of them, fits) from imported kernels, fitted once a model, GPU and cut.

    ``most`` fits are made; None: all.
    """
    groups: dict[Group, list[Point]] = {}
    for point in filter(is_expressible, points):
        groups.setdefault(point.group, []).append(point)
    groups = dict(list(groups.items())[:most])
    kept = [
        (point, said)
        for group, tables in _fits(groups, shared)
        for point in groups[group]
        if (said := _message(point, tables, unseen(point)))
    ]
    return kept, len(groups)


def _fits(groups: dict[Group, list[Point]], shared: Path) -> Iterator[tuple[Group, CostTables]]:
    """Tables of each group, wide enough for all of its points; a GPU's kernels are read once."""
    profiles: dict[str, Profile] = {}
    for group, mine in groups.items():
        one, loops = mine[0], [loop_of(point) for point in mine]
        if one.gpu not in profiles:
            system = f"{one.gpu.lower()}_sxm"
            profiles[one.gpu] = import_aiconfigurator(shared / ROOT, system, one.backend, VERSION)
        longest = max(map(_longest, loops))
        limits = _limits(one, max(loop.clients for loop in loops), longest)
        model, gpu, cut = catalog.model(one.model), catalog.gpu(one.gpu), Parallelism(one.tp)
        node = catalog.default_node(gpu, one.tp)
        yield group, fit_profile(profiles[one.gpu], model, gpu, node, cut, limits, longest)[0]


def _message(point: Point, cost: str | CostTables, unseen: HostOverhead) -> Message:
    """What the engine says with each host; nothing where the deployment does not fit."""
    try:
        plain = deployed(point, cost, "default")
    except InputError:
        return {}
    hosts: dict[str, str | HostOverhead] = {"engine": point.backend, "unseen": unseen}
    others = {name: deployed(point, plain.cost, host) for name, host in hosts.items()}
    requests = workload(loop_of(point))
    return {
        name: means(simulate(requests, deployment, keep_steps=0))
        for name, deployment in ({"default": plain} | others).items()
    }


def deployed(point: Point, cost: str | CostTables, host: str | HostOverhead) -> Deployment:
    """The point's deployment as anyone may ask for it.

    Raises:
        InputError: It does not fit these GPUs.
    """
    loop = loop_of(point)
    return deploy(
        point.model,
        point.gpu,
        tp=point.tp,
        limits=_limits(point, loop.clients, _longest(loop), loop.budget),
        scheduler="vllm_v1" if loop.mixed else "vllm_v0",
        cost=cost,
        host=host,
    )


def _longest(loop: Loop) -> int:
    return loop.prompt[1] + loop.output[1] + 1


def _limits(point: Point, seqs: int, longest: int, budget: int = 8192) -> EngineLimits:
    return EngineLimits(
        max_num_seqs=seqs,
        max_num_batched_tokens=max(budget, seqs),
        max_model_len=longest,
        weight_dtype=point.dtype,
        kv_dtype=kv_dtype(point),
    )
