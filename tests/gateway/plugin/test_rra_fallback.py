"""Where a schedule cannot be kept, or keeping it fails, the engine has its own and goes on."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import rra_world
from rra_world import Request
from vllm_modules import in_place, schedulers

from lengthwise.gateway.plugin import RraScheduler
from lengthwise.gateway.plugin.rra_scheduler import PhasedScheduler, StepRestriction

Stock, Asynchronous = schedulers(rra_world.Engine)


@pytest.fixture
def vllm(monkeypatch):
    """Modules of vLLM's names that hold the world."""
    return in_place(monkeypatch, rra_world.Request, Stock, Asynchronous)


def config(*, asynchronous=False, pp=1, dp=1, runner="generate", connector=None, speculative=None, **settings):
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
        additional_config={"lengthwise": {"prefill_batch": 2, "decode_steps": 3} | settings},
        parallel_config=SimpleNamespace(pipeline_parallel_size=pp, data_parallel_size=dp),
        model_config=SimpleNamespace(runner_type=runner, is_encoder_decoder=False),
        speculative_config=speculative,
        kv_transfer_config=connector,
    )


def filled(made, count=6):
    requests = [Request(f"r{k}", 5, 9) for k in range(count)]
    for one in requests:
        made.add_request(one)
    return requests


def stays(made, caplog, states):
    """Checks that the first step takes all requests in the order of the engine and one warning gives the reason."""
    assert states in caplog.text
    assert len([one for one in caplog.records if one.levelno >= logging.WARNING]) == 1
    requests = filled(made)
    made.run()
    assert made.log[0] == (6, 0)
    assert all(len(one.output) == 9 for one in requests)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_class_is_that_of_vllm_and_follows_the_schedule(vllm, caplog, asynchronous):
    with caplog.at_level(logging.INFO, "vllm.lengthwise"):
        made = RraScheduler(vllm_config=config(asynchronous=asynchronous))
    assert isinstance(made, PhasedScheduler)
    assert isinstance(made, Asynchronous) == asynchronous
    assert "restricts this engine to rra(prefill_batch=2, decode_steps=3, micro_batches=0)" in caplog.text
    filled(made)
    made.run()
    assert made.log[:5] == [(2, 0), (0, 2), (0, 2), (0, 2), (2, 0)]


@pytest.mark.parametrize(
    ("given", "states"),
    [
        ({"prefill_batch": 0}, "prefill_batch must be a"),
        ({"decode_steps": 2.5}, "decode_steps must be an integer"),
        ({"decode_steps": "many"}, "decode_steps"),
        ({"threshold": 1.5}, "threshold must be from 0 to below 1"),
        ({"threshold": 0.1}, "prompt_tokens must be a"),
        ({"record": 7}, "record must be a file's name"),
        ({"record": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"preemption": "never"}, "there is no setting of lengthwise named 'preemption'"),
        ({"pp": 2}, "pipeline stages"),
        ({"dp": 2}, "data-parallel"),
        ({"connector": object()}, "KV connector"),
        ({"speculative": object()}, "speculation"),
        ({"runner": "pooling"}, "it does not decode"),
    ],
)
def test_an_unusable_schedule_leaves_the_engine_unchanged(vllm, caplog, given, states):
    stays(RraScheduler(vllm_config=config(**given)), caplog, states)


def test_a_missing_schedule_is_reported(vllm, caplog):
    bare = config()
    bare.additional_config = None
    stays(RraScheduler(vllm_config=bare), caplog, "must have prefill_batch and decode_steps")


def test_an_untested_version_keeps_its_own_schedule_unless_trusted(vllm, caplog):
    vllm["vllm"].__version__ = "0.33.0"
    stays(RraScheduler(vllm_config=config()), caplog, "this is vLLM 0.33.0")
    made = RraScheduler(vllm_config=config(trust_version=True))
    filled(made)
    made.run()
    assert made.log[0] == (2, 0)


def test_an_engine_that_does_not_pass_decodes_over_is_found_at_the_start(vllm, caplog, monkeypatch):
    plain = rra_world.Engine.schedule

    def schedule(self, throttle_prefills=False):
        return plain(self)

    monkeypatch.setattr(Stock, "schedule", schedule, raising=False)
    stays(RraScheduler(vllm_config=config()), caplog, "does not check when a decode is due")


def test_requests_without_what_is_set_are_found_at_the_start(vllm, caplog):
    class Other(Request):
        def __init__(self, request_id):
            self.request_id = request_id

    vllm["vllm.v1.request"].Request = Other
    stays(RraScheduler(vllm_config=config()), caplog, "next_decode_eligible_step")


def test_a_scheduler_without_slots_is_detected_at_construction(vllm, caplog, monkeypatch):
    begin = Stock.__init__

    def other(self, *args, **named):
        begin(self, *args, **named)
        self.max_num_active_reqs = 64.0

    monkeypatch.setattr(Stock, "__init__", other)
    stays(RraScheduler(vllm_config=config()), caplog, "max_num_active_reqs is float")


@pytest.mark.parametrize(
    "where", ["before", "after", "on_output", "tracker.admits", "tracker.prefilled", "tracker.decoded"]
)
@pytest.mark.parametrize("at", [1, 2, 7])
def test_any_failure_is_reported_once_and_the_engine_continues_on_its_own(vllm, caplog, monkeypatch, where, at):
    made = RraScheduler(vllm_config=config())
    home = made.lengthwise.tracker if where.startswith("tracker.") else made.lengthwise
    name, calls = where.removeprefix("tracker."), []
    plain = getattr(home, name)

    def fails(*args):
        calls.append(1)
        if len(calls) == at:
            raise RuntimeError("a changed engine")
        return plain(*args)

    monkeypatch.setattr(home, name, fails)
    requests = filled(made, 30)
    made.run()
    assert made.lengthwise is None
    assert caplog.text.count("from now on this engine keeps its own schedule") == 1
    assert len(made.finished) == 30
    assert all(one.next_decode_eligible_step == 0 for one in requests)
    assert made.max_num_active_reqs == 64


def test_an_error_of_the_engine_itself_is_not_hidden_and_leaves_it_as_it_was(vllm, monkeypatch):
    made = RraScheduler(vllm_config=config())
    requests = filled(made)
    for _ in range(5):
        made.step()

    def broken(self, throttle_prefills=False):
        raise ValueError("no memory")

    monkeypatch.setattr(Stock, "schedule", broken, raising=False)
    with pytest.raises(ValueError, match="no memory"):
        made.schedule()
    assert all(one.next_decode_eligible_step == 0 for one in requests)
    assert made.max_num_active_reqs == 64


def test_a_step_that_cannot_be_restricted_leaves_no_request_paused_and_all_slots():
    """A request that was paused before the failure would stay paused for ever."""

    class Stubborn:
        @property
        def next_decode_eligible_step(self) -> int:
            return 5

        @next_decode_eligible_step.setter
        def next_decode_eligible_step(self, step: int) -> None:
            if step != 5:
                raise AttributeError("frozen")

    first = SimpleNamespace(next_decode_eligible_step=3)
    scheduler = SimpleNamespace(max_num_active_reqs=8, running=[first], num_waiting_for_streaming_input=0)
    with pytest.raises(AttributeError, match="frozen"):
        StepRestriction(scheduler, is_prefill=True, admit=2, paused=[first, Stubborn()])
    assert (first.next_decode_eligible_step, scheduler.max_num_active_reqs) == (3, 8)
