"""Runs on engine processes of this machine: answers, continued answers, stages, and nothing left behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from engines_world import answers, chained, engines, job_of, local, plan, play, reported, undisturbed, until
from plan_world import tasks_of

from lengthwise.apps.launch import EngineConfig, StaticLauncher
from lengthwise.apps.ledger import State, open_ledger
from lengthwise.apps.run import PlanDeviation, StaticPlacer
from lengthwise.apps.run.job import RevisedPlan
from lengthwise.schema.errors import EngineError, InputError
from lengthwise.testing.engine_server import EngineServer, EngineSpec

pytestmark = pytest.mark.slow


def test_chains_over_two_models_are_answered_and_no_engine_is_left(tmp_path):
    tasks = chained()
    job, launcher = job_of(tasks, [(plan(0), plan(1))]), local(tmp_path, ("m0", "m1"))
    urls = set()

    def watch(progress):
        urls.update(url for url, _ in engines(launcher))
        assert 0 <= progress.share <= 1

    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        finished = asyncio.run(play(job, ledger, launcher, monitor=watch))
        assert finished.exit_code == 0
        assert finished.of(State.DONE) == len(tasks)
        message = answers(ledger, job.layout)
        assert all(output.output_tokens > 0 and output.prompt_tokens > 0 for _, output in message)
        assert {about.split(" at ")[0] for abouts in finished.engines.values() for about in abouts} == {
            "vllm 0.33.0+emulated"
        }
    for url in urls:
        with pytest.raises(OSError, match="refused"):
            reported(url)


def test_a_cut_answer_goes_on_from_its_tokens_and_is_the_same(tmp_path):
    """The plan takes the model from one GPU to two while it writes; what the engine wrote is not written again."""
    tasks = tasks_of([0] * 4 + [1])
    slow = {"more": "--fixed-s 0.02"}
    complete = undisturbed(tmp_path, tasks, **slow)
    job = job_of(tasks, [(plan(0), plan(1)), (plan(0, tp=2),)])
    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        saved = []
        keep, ledger.save = ledger.save, lambda partials: (saved.extend(partials), keep(partials))[1]
        finished = asyncio.run(play(job, ledger, local(tmp_path, ("m0", "m1"), **slow)))
        assert finished.exit_code == 0
        assert answers(ledger, job.layout) == complete
        assert any(partial.output_ids and partial.prompt_ids for _, partial in saved)


def test_without_reported_tokens_an_answer_starts_again_and_is_the_same(tmp_path):
    tasks = tasks_of([0] * 4 + [1])
    slow = {"more": "--fixed-s 0.02 --kind openai"}
    complete = undisturbed(tmp_path, tasks, **slow)
    job = job_of(tasks, [(plan(0), plan(1)), (plan(0, tp=2),)])
    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        finished = asyncio.run(play(job, ledger, local(tmp_path, ("m0", "m1"), **slow)))
        assert finished.exit_code == 0
        assert answers(ledger, job.layout) == complete


def test_the_same_request_is_sent_once(tmp_path):
    tasks = tasks_of([0] * 8)
    job = job_of(tasks, [(plan(0),)])
    first = job.decider.decide
    job.decider.decide = lambda task, outputs: first(task % 2, outputs)
    launcher = local(tmp_path, ("m0",))
    seen = []

    def watch(_):
        seen.extend(len(reported(url)["entries"]) for url, _ in engines(launcher))

    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        assert asyncio.run(play(job, ledger, launcher, monitor=watch)).of(State.DONE) == 8
        message = [output for _, output in answers(ledger, job.layout)]
        assert message == message[:2] * 4
    assert max(seen, default=0) <= 2


def test_an_engine_that_does_not_start_ends_the_run_with_its_message(tmp_path):
    launcher = local(
        tmp_path, ("m0",), command="python3 -c 'import sys; sys.exit(\"no such weights\")' {port}", more=""
    )
    job = job_of(tasks_of([0] * 3), [(plan(0),)])
    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        with pytest.raises(EngineError, match="no such weights"):
            asyncio.run(play(job, ledger, launcher))
        assert ledger.counts() == {(0, State.READY): 3}


def test_drift_beyond_the_plan_requests_a_new_one_which_is_followed(tmp_path):
    tasks = tasks_of([0] * 6 + [1] * 2)
    drifts = []
    job = job_of(tasks, [(plan(0),), (plan(1),)])

    def replan(deviation: PlanDeviation):
        drifts.append(deviation)
        return RevisedPlan(type(job.run_plan)(((plan(0), plan(1)),), ends_s=()), is_new=True, description="late")

    run_plan = type(job.run_plan)(job.run_plan.stages, ends_s=(0.01, 0.02))
    job = job_of(tasks, run_plan.stages, replan=replan)
    object.__setattr__(job, "run_plan", run_plan)
    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        finished = asyncio.run(play(job, ledger, local(tmp_path, ("m0", "m1"))))
        assert finished.exit_code == 0
    assert drifts[0].stage == 0
    assert "replan" in [event.what for event in finished.events]
    assert len(drifts) == 1


def test_cancelled_from_another_process_it_stops_and_goes_on_later(tmp_path):
    tasks = chained()
    complete = undisturbed(tmp_path, tasks)
    job, place = job_of(tasks, [(plan(0), plan(1))]), tmp_path / "ledger.sqlite"

    async def cancel(_, launcher):
        await until(lambda: len(engines(launcher)) == 2)
        with open_ledger(place) as other:
            other.set_metadata({"cancel": "now"})

    with open_ledger(place) as ledger:
        finished = asyncio.run(play(job, ledger, local(tmp_path, ("m0", "m1"), more="--fixed-s 0.1"), cancel))
        assert (finished.how, finished.exit_code) == ("cancelled", 130)
        assert finished.of(State.LEASED) == 0
    with open_ledger(place) as ledger:
        again = asyncio.run(play(job_of(tasks, [(plan(0), plan(1))]), ledger, local(tmp_path, ("m0", "m1"))))
        assert again.resumed
        assert answers(ledger, job.layout) == complete


def test_sleeping_engines_are_woken_in_place_and_answer_the_same(tmp_path):
    tasks = chained(rows=3)
    complete = undisturbed(tmp_path, tasks)
    job = job_of(tasks, [(plan(0),), (plan(1),), (plan(0),)], gpus=1)
    launcher = local(tmp_path, ("m0", "m1"), sleeps=True)
    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        finished = asyncio.run(play(job, ledger, launcher))
        assert finished.exit_code == 0
        assert answers(ledger, job.layout) == complete
    what = [(event.what, event.model) for event in finished.events if event.what in ("start", "wake", "sleep")]
    assert what == [("start", 0), ("sleep", 0), ("start", 1), ("sleep", 1), ("wake", 0)]


def test_external_engines_are_used_and_left_running(tmp_path):
    tasks = chained()
    complete = undisturbed(tmp_path, tasks)

    async def others():
        m0, m1 = EngineSpec("m0"), EngineSpec("m1")
        async with EngineServer(m0) as one, EngineServer(m0) as two, EngineServer(m1) as three:
            models = [EngineConfig("m0", max_num_seqs=2), EngineConfig("m1", served="m1", max_num_seqs=2)]
            launcher = StaticLauncher(models, {0: [one.url, two.url], 1: [three.url]})
            given = job_of(tasks, [launcher.plans()])
            job = replace(given, placer=StaticPlacer())
            finished = await play(job, ledger, launcher)
            assert one.up
            assert two.up
            assert min(len(one.log.entries), len(two.log.entries)) > 2
            return finished, answers(ledger, job.layout)

    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        finished, message = asyncio.run(others())
    assert finished.exit_code == 0
    assert message == complete


def test_a_model_without_an_address_is_named():
    with pytest.raises(InputError, match="there is none for m1"):
        StaticLauncher([EngineConfig("m0"), EngineConfig("m1")], {0: ["http://127.0.0.1:1"]})


def test_places_in_a_command_are_checked_before_anything_starts():
    with pytest.raises(InputError, match=r"no placeholder in the command of m0 named 'prot'\. Did you mean: port"):
        EngineConfig("m0", command="serve --port {prot}")
    with pytest.raises(InputError, match="max_num_seqs of m0 must be at least 1"):
        EngineConfig("m0", max_num_seqs=0)


def test_a_changed_prompt_requests_what_it_changed_and_its_dependents(tmp_path):
    from engines_world import Prompts

    tasks = chained()
    place = tmp_path / "ledger.sqlite"
    with open_ledger(place) as ledger:
        asyncio.run(play(job_of(tasks, [(plan(0), plan(1))]), ledger, local(tmp_path, ("m0", "m1"))))

    class Changed(Prompts):
        """The second call of each row is another one."""

        def decide(self, task, outputs):
            self.version = "v2" if task % 3 == 1 else "v1"
            return super().decide(task, outputs)

    job = job_of(tasks, [(plan(0), plan(1))], decider=Changed(tasks), words="another app")
    with open_ledger(place) as ledger:
        finished = asyncio.run(play(job, ledger, local(tmp_path, ("m0", "m1"))))
        assert not finished.resumed
        assert finished.reused.retained == (6, 0)
        assert finished.reused.remaining == (6, 6)
        assert finished.of(State.DONE) == 18
        assert "c0: 6 of 12 answers kept; c1: 0 of 6" in finished.reused.words()


def test_engines_that_cannot_sleep_after_all_are_restarted_and_answer_the_same(tmp_path):
    """The ladder's last rung: ``sleeps`` is set for engines that have no /sleep."""
    tasks = chained(rows=3)
    complete = undisturbed(tmp_path, tasks)
    job = job_of(tasks, [(plan(0),), (plan(1),), (plan(0),)], gpus=1)
    launcher = local(tmp_path, ("m0", "m1"), sleeps=True, more="--fixed-s 0.002 --kind sglang")
    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        finished = asyncio.run(play(job, ledger, launcher))
        assert finished.exit_code == 0
        assert answers(ledger, job.layout) == complete
    what = [(event.what, event.model) for event in finished.events if event.what in ("start", "wake", "sleep")]
    assert what == [("start", 0), ("start", 1), ("start", 0)]
