"""What runs next (section 4.3): as planned where all goes as planned, sensible where it does not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lengthwise.apps.placement import next_plans
from lengthwise.schema.app import ModelPlan

GPUS = 4


def p(model, dp=1):
    return ModelPlan(model, "G", dp)


def fits(plans):
    return sum(plan.gpus for plan in plans) <= GPUS


@st.composite
def staged(draw):
    """Stages as a planner makes them: each ends with one of its models, which is in none later."""
    left, stages, ends = list(range(draw(st.integers(1, 5)))), [], []
    while left:
        stage, free = [], GPUS
        for m in draw(st.permutations(left)):
            dp = draw(st.integers(0 if stage else 1, GPUS))
            if 0 < dp <= free:
                stage.append(p(m, dp))
                free -= dp
        done = draw(st.sampled_from([plan.model for plan in stage]))
        stages.append(tuple(sorted(stage)))
        ends.append(done)
        left.remove(done)
    return stages, ends


@given(staged())
def test_as_planned_the_stages_are_played_one_after_another(plan):
    stages, ends = plan
    finished, ran, now = set(), set(), next_plans(stages, -1, (), set(), fits)
    for k, done in enumerate(ends):
        assert now.stage == k
        more = set(now.plans) - set(stages[k])
        assert set(stages[k]) <= set(now.plans)
        assert more <= ran, "beside them only who ran before, where there is room"
        ran = set(now.plans)
        finished.add(done)
        now = next_plans(stages, now.stage, now.plans, finished, fits)
    assert now.stage == len(stages)
    assert now.plans == ()


@given(staged(), st.data())
def test_in_whatever_order_models_finish_all_finish_and_no_gpu_is_taken_twice(plan, data):
    stages, ends = plan
    finished, now = set(), next_plans(stages, -1, (), set(), fits)
    for _ in range(len(ends)):
        assert now.plans, "some model runs while some model is left"
        assert fits(now.plans)
        models = [plan.model for plan in now.plans]
        assert len(set(models)) == len(models)
        assert not finished & set(models)
        finished.add(data.draw(st.sampled_from(models)))
        later = next_plans(stages, now.stage, now.plans, finished, fits)
        assert later.stage >= now.stage
        for one in now.plans:  # no model is stopped in its last stage
            ahead = {q.model for stage in stages[later.stage :] for q in stage}
            if one.model not in finished | ahead:
                assert one in later.plans
        if later.stage > now.stage and later.stage < len(stages):
            for one in stages[now.stage]:  # all of a stage ran or ended before the next one is looked at
                assert one.model in finished or one in now.plans
        now = later
    assert now.plans == ()


def test_a_model_in_its_last_stage_continues_though_another_was_to_finish_first():
    stages = [(p(0, 2), p(1), p(2)), (p(1, 2), p(2), p(3))]
    now = next_plans(stages, 0, stages[0], {2}, fits)  # model 0 was to finish first
    assert now.stage == 1
    assert now.plans == (p(0, 2), p(1, 2))  # it is kept; of the next stage what has room, in its order
    now = next_plans(stages, 1, now.plans, {0, 2}, fits)
    assert now.plans == (p(1, 2), p(3))


def test_a_model_absent_from_the_next_stage_continues_where_there_is_room():
    stages = [(p(0, 2), p(1)), (p(2, 3),), (p(1, 4),)]
    assert next_plans(stages, 0, stages[0], {0}, fits).plans == (p(1), p(2, 3))
    stages = [(p(0, 2), p(1, 2)), (p(2, 3),), (p(1, 4),)]
    assert next_plans(stages, 0, stages[0], {0}, fits).plans == (p(2, 3),)


def test_where_a_finished_one_leaves_its_gpus_the_stage_behind_is_looked_at():
    stages = [(p(0, 2), p(1, 2)), (p(1, 2), p(2, 2)), (p(2, 2), p(3, 2))]
    now = next_plans(stages, 0, stages[0], {0, 1}, fits)
    assert now.stage == 1
    assert now.plans == (p(2, 2), p(3, 2))


def test_a_model_of_no_stage_runs_behind_the_last_one_and_one_that_starves_gives_way():
    stages = [(p(0, 4),)]
    now = next_plans(stages, 0, stages[0], {0}, fits, reserve=(p(1, 4), p(2)))
    assert (now.stage, now.plans) == (1, (p(1, 4),))
    assert next_plans(stages, 1, now.plans, {0, 1}, fits, reserve=(p(1, 4), p(2))).plans == (p(2),)
    stages = [(p(0, 3), p(1)), (p(2, 3),)]
    assert next_plans(stages, 0, stages[0], {1}, fits).plans == (p(0, 3),)
    assert next_plans(stages, 0, stages[0], {1}, fits, starved={0}).plans == (p(2, 3),)


def test_models_that_take_turns_go_on_doing_so_behind_the_last_stage():
    stages = [(p(0, 4),), (p(1, 4),)]
    now = next_plans(stages, 1, stages[1], set(), fits, starved={1})
    assert (now.stage, now.plans) == (2, (p(0, 4),))
    now = next_plans(stages, now.stage, now.plans, set(), fits, starved={0})
    assert (now.stage, now.plans) == (2, (p(1, 4),))
    assert next_plans(stages, now.stage, now.plans, set(), fits).plans == (p(1, 4),)
    assert next_plans(stages, now.stage, now.plans, {1}, fits).plans == (p(0, 4),)


def test_spare_models_take_turns_too():
    stages, spare = [(p(0, 4),)], (p(1, 4), p(2, 4))
    now = next_plans(stages, 1, (p(1, 4),), {0}, fits, reserve=spare, starved={1})
    assert now.plans == (p(2, 4),)
    assert next_plans(stages, 1, now.plans, {0}, fits, reserve=spare, starved={2}).plans == (p(1, 4),)
