"""Where anything is uncertain, or fails, the engine keeps its own order and goes on."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import plugin_world
import pytest
from plugin_world import request
from vllm_modules import in_place, schedulers

from lengthwise.gateway.plugin import LengthScheduler
from lengthwise.gateway.plugin.length_scheduler import OrderedScheduler, Preemption
from lengthwise.gateway.plugin.vllm_adapter import TESTED, class_warnings

LENGTHS = (90, 50, 10, 70, 5)
ARRIVAL = [f"r{k}" for k in range(5)]
SHORTEST = ["r4", "r2", "r1", "r3", "r0"]


Stock, Asynchronous = schedulers(plugin_world.Scheduler)


@pytest.fixture
def vllm(monkeypatch):
    """Modules of vLLM's names that hold the world."""
    return in_place(
        monkeypatch,
        plugin_world.Request,
        Stock,
        Asynchronous,
        diffusion_scheduler=type("DiffusionScheduler", (Stock,), {}),
    )


def config(*, asynchronous=False, diffusion=None, **settings):
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
        additional_config={"lengthwise": {"preemption": "never"} | settings},
        diffusion_config=diffusion,
    )


def filled(scheduler):
    for name, length in zip(ARRIVAL, LENGTHS, strict=True):
        scheduler.add_request(request(name, length, length=length))
    return scheduler


@pytest.mark.parametrize("asynchronous", [False, True])
def test_it_is_the_class_that_vllm_would_take_and_orders(vllm, caplog, asynchronous):
    with caplog.at_level(logging.INFO, "vllm.lengthwise"):
        made = LengthScheduler(vllm_config=config(asynchronous=asynchronous))
    assert isinstance(made, OrderedScheduler)
    assert isinstance(made, Asynchronous if asynchronous else Stock)
    assert isinstance(made, Asynchronous) == asynchronous
    assert "orders this engine" in caplog.text
    assert filled(made).run() == SHORTEST


def no_doubt(made, caplog, states):
    assert states in caplog.text
    assert len([one for one in caplog.records if one.levelno >= logging.WARNING]) == 1
    assert filled(made).run() == ARRIVAL


@pytest.mark.parametrize(
    ("settings", "states"),
    [
        ({"rank": "shortest"}, "rank"),
        ({"rank": "vtc"}, "service_tokens"),
        ({"max_wait_s": -1}, "max_wait_s"),
        ({"nonsense": 1}, "nonsense"),
        ({"diffusion": object()}, "DiffusionScheduler"),
    ],
)
def test_settings_that_cannot_be_used_leave_the_engine_as_it_is(vllm, caplog, settings, states):
    made = LengthScheduler(vllm_config=config(**settings))
    assert not isinstance(made, OrderedScheduler)
    no_doubt(made, caplog, states)


def test_an_untested_version_keeps_its_own_order_unless_trusted(vllm, caplog):
    vllm["vllm"].__version__ = "0.99.1"
    no_doubt(LengthScheduler(vllm_config=config()), caplog, "0.99.1")
    assert filled(LengthScheduler(vllm_config=config(trust_version=True))).run() == SHORTEST
    vllm["vllm"].__version__ = TESTED[0] + "+cpu"
    assert filled(LengthScheduler(vllm_config=config())).run() == SHORTEST


@pytest.mark.parametrize("name", ["_preempt_request", "get_kv_cache_usage", "_request_blocks_can_be_freed"])
def test_a_method_that_is_gone_is_found_at_the_start(vllm, caplog, monkeypatch, name):
    monkeypatch.delattr(plugin_world.Scheduler, name)
    no_doubt(LengthScheduler(vllm_config=config()), caplog, name)


def test_a_method_that_takes_something_else_is_found_at_the_start(vllm, caplog, monkeypatch):
    monkeypatch.setattr(plugin_world.Scheduler, "_preempt_request", lambda self, ids, when: None)
    no_doubt(LengthScheduler(vllm_config=config()), caplog, "_preempt_request takes")


def test_requests_without_what_is_read_of_them_are_found_at_the_start(vllm, caplog):
    class Other:
        def __init__(self, request_id):
            self.request_id = request_id

    assert len(list(class_warnings(Stock, Other))) == 2
    vllm["vllm.v1.request"].Request = Other
    no_doubt(LengthScheduler(vllm_config=config()), caplog, "num_computed_tokens")


def test_another_queue_is_found_at_the_start(vllm, caplog, monkeypatch):
    class Heap(list):
        popleft = list.pop

    begin = Stock.__init__

    def with_heap(self, *args, **named):
        begin(self, *args, **named)
        self.kv_holding_waiting, self.waiting = self.waiting, Heap()

    monkeypatch.setattr(Stock, "__init__", with_heap)
    made = LengthScheduler(vllm_config=config())
    assert "--scheduling-policy fcfs" in caplog.text
    assert made.lengthwise is None


def test_an_error_of_the_engine_itself_is_not_hidden(vllm, monkeypatch):
    def broken(self, vllm_config):
        raise ValueError("no memory")

    monkeypatch.setattr(Stock, "__init__", broken)
    with pytest.raises(ValueError, match="no memory"):
        LengthScheduler(vllm_config=config())


@pytest.mark.parametrize(
    "where", ["before", "after", "book.entry", "book.in_order", "book.needs_sort", "book.on_admitted"]
)
@pytest.mark.parametrize("at", [1, 2, 30])
def test_any_failure_is_reported_once_and_the_engine_continues_in_its_own_order(vllm, caplog, monkeypatch, where, at):
    made = LengthScheduler(vllm_config=config(window_tokens=4))
    home = made.lengthwise.registry if where.startswith("book.") else made.lengthwise
    name, calls = where.removeprefix("book."), []
    plain = getattr(home, name)

    def fails(*args):
        calls.append(1)
        if len(calls) == at:
            raise RuntimeError("a changed engine")
        return plain(*args)

    monkeypatch.setattr(home, name, fails)
    filled(made)
    for k in range(40):
        made.schedule()
        made.tokens()
        made.add_request(request(f"x{k}", 3, length=3))
    made.run()
    assert sorted(made.finished) == sorted([*ARRIVAL, *(f"x{k}" for k in range(40))])
    if len(calls) >= at:
        assert made.lengthwise is None
        assert caplog.text.count("from now on this engine keeps its own order") == 1


@pytest.mark.parametrize("where", ["cut", "preempt"])
def test_a_preempted_request_is_not_lost_whatever_fails_afterwards(vllm, monkeypatch, where):
    made = LengthScheduler(vllm_config=config(preemption="worth(factor=0)", window_tokens=4, preemptions_per_s=1e9))
    made.add_request(request("long", 200, length=200))
    for _ in range(20):
        made.schedule()
        made.tokens()
    if where == "cut":
        monkeypatch.setattr(Preemption, "record", lambda *_: 1 / 0)
    else:
        monkeypatch.setattr(plugin_world.Scheduler, "_preempt_request", lambda *_: 1 / 0)
    made.add_request(request("short", 3, length=3))
    made.run()
    assert sorted(made.finished) == ["long", "short"]
    assert made.lengthwise is None
