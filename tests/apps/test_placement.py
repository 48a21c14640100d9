"""Where replicas go: islands kept, nothing loaded that need not be."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from plan_world import cluster_of

from lengthwise.apps import placement
from lengthwise.apps.placement import degrees, is_replica
from lengthwise.schema.app import ModelPlan

KIND = "A100-80GB"


def seconds(plan, how):
    return (10.0 + plan.model + 3.0 * plan.tp) * (0.25 if how == "wake" else 1.0)


def plan_of(model, dp=1, tp=1, pp=1, gpu=KIND):
    return ModelPlan(model, gpu, dp, tp, pp)


@st.composite
def worlds(draw, max_gpus=6):
    """(cluster, plans before, plans now): small ones, some of which have no room."""
    kinds = draw(st.sampled_from([(KIND,), (KIND, "H100")]))
    machines = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2).filter(lambda m: sum(m) <= max_gpus))
    cluster = cluster_of(*machines, group=draw(st.sampled_from([1, 2, 4])), kinds=kinds)

    def plans():
        some = draw(st.lists(st.integers(0, 4), max_size=3, unique=True))
        shape = st.tuples(st.integers(1, 2), st.sampled_from([1, 1, 2, 3, 4]), st.sampled_from([1, 1, 2]))
        return [plan_of(m, *draw(shape), gpu=draw(st.sampled_from(kinds))) for m in some]

    return cluster, plans(), plans()


def slots(plan, cluster):
    """Every replica that there may be, the slow way."""
    many = itertools.combinations(range(cluster.gpus), plan.tp)
    groups = [g for g in many if _legal(g, plan, cluster)]
    chains = itertools.combinations(groups, plan.pp)
    return [sum(c, ()) for c in chains if len(set(sum(c, ()))) == plan.tp * plan.pp]


def _legal(group, plan, cluster):
    """A tensor-parallel group, as the paper's sentence has it."""
    where = {int(cluster.machine_of[g]) for g in group}
    if len(where) > 1:
        return False
    machine, first = cluster.machines[where.copy().pop()], cluster.first_of[where.pop()]
    size, local_gpus = machine.node.link_group, [g - first for g in group]
    islands = {k // size for k in local_gpus}
    if machine.gpu.name != plan.gpu:
        return False
    if plan.tp <= size:
        low = local_gpus[0] - (local_gpus[0] // size) * size
        return len(islands) == 1 and low % plan.tp == 0 and local_gpus[-1] - local_gpus[0] == plan.tp - 1
    return set(local_gpus) == {k for i in islands for k in range(i * size, (i + 1) * size)}


def brute(plans, before, cluster, running):
    """The least seconds of loading over all ways there are; None: none."""
    shapes = {p.model: p.shape for p in running}
    best = None

    def fill(i, used, effort):
        nonlocal best
        if best is not None and effort >= best:
            return
        if i == len(plans):
            best = effort
            return
        plan = plans[i]
        stays = before.get(plan.model, ()) if shapes.get(plan.model) == plan.shape else ()
        for some in itertools.combinations(slots(plan, cluster), plan.dp):
            own = [g for r in some for g in r]
            if len(set(own)) == len(own) and not used & set(own):
                fresh = sum(set(r) not in [set(s) for s in stays] for r in some)
                fill(i + 1, used | set(own), effort + fresh * seconds(plan, "start"))

    fill(0, set(), 0.0)
    return best


@settings(max_examples=150)
@given(worlds())
def test_no_gpu_is_used_twice_islands_stay_together_and_loading_is_minimal(world):
    cluster, first, then = world
    before = placement.place(first, {}, cluster, seconds) or {}
    running = first if before else []
    after = placement.place(then, before, cluster, seconds, running=running)
    best = brute(then, before, cluster, running)
    assert (after is None) == (best is None)
    if after is None:
        return
    used = [g for replicas in after.values() for r in replicas for g in r]
    assert len(used) == len(set(used))
    assert all(is_replica(r, plan, cluster) for plan in then for r in after[plan.model])
    assert all(len(after[plan.model]) == plan.dp for plan in then)
    made = placement.switches(then, after, before, seconds, running=running)
    assert abs(sum(s.seconds for s in made) - best) < 1e-9
    assert len(made) <= sum(plan.dp for plan in then)


@given(worlds())
@settings(max_examples=50)
def test_running_replicas_stay_and_equal_plans_are_placed_equally(world):
    cluster, first, _ = world
    before = placement.place(first, {}, cluster, seconds)
    assert before == placement.place(first, {}, cluster, seconds)
    assert placement.fits(first, cluster) == (before is not None)
    if before is not None:
        assert placement.place(first, before, cluster, seconds, running=first) == before


def test_a_pair_that_is_needed_is_cleared_by_moving_the_cheaper_model():
    cluster = cluster_of(4)
    before = {0: ((0,),), 1: ((2,),)}
    after = placement.place([plan_of(0), plan_of(1), plan_of(2, tp=2)], before, cluster, seconds)
    assert after == {0: ((3,),), 1: ((2,),), 2: ((0, 1),)}  # model 1 is the dearer one to move


def test_a_replica_wakes_where_it_sleeps():
    cluster, plan = cluster_of(4), plan_of(0)
    sleeping = {(0, plan.shape): ((3,),)}
    after = placement.place([plan], {}, cluster, seconds, sleeping=sleeping)
    made = placement.switches([plan], after, {}, seconds, sleeping=sleeping)
    assert after == {0: ((3,),)}
    assert [(s.how, s.seconds) for s in made] == [("wake", seconds(plan, "wake"))]


def test_more_gpus_than_an_island_are_complete_islands_and_a_pipeline_stays_on_one_machine():
    cluster = cluster_of(4, 8)
    both = placement.place([plan_of(0), plan_of(1, tp=4)], {}, cluster, seconds)
    assert both == {0: ((4,),), 1: ((0, 1, 2, 3),)}
    placed = placement.place([plan_of(0), plan_of(1, pp=4)], {}, cluster, seconds)
    assert {int(cluster.machine_of[g]) for g in placed[1][0]} == {0}
    assert placement.place([plan_of(0, tp=4, pp=3)], {}, cluster, seconds) is not None
    assert degrees(cluster.machines[0]) == [1, 2, 4]


def test_sixteen_gpus_that_all_have_to_move_a_little_are_placed_soon_and_right():
    cluster = cluster_of(16)
    first = [plan_of(m) for m in range(8)]
    before = {m: ((2 * m,),) for m in range(8)}
    then = [*first, *(plan_of(m, tp=2) for m in range(8, 12))]
    after = placement.place(then, before, cluster, seconds, running=first)
    moved = placement.switches(first, after, before, seconds, running=first)
    assert sorted(s.model for s in moved) == [0, 1, 2, 3]  # the cheapest four make room
