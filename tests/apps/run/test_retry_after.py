"""A full engine that states a retry time gets the request again at that time, and not before."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from engines_world import engines, job_of, local, plan, post, tasks_of

from lengthwise.apps.launch import Draft, TaskRequest
from lengthwise.apps.launch.engine import FailedError, Fault
from lengthwise.apps.ledger import Lease, State
from lengthwise.apps.run import Settings
from lengthwise.apps.run.task_state import LeasedTask, LeaseSettler, SharedState
from lengthwise.backend.openai import retry_after_s

NOW_S = 1000.0
SETTINGS = Settings(backoff_s=1.0, max_backoff_s=60.0)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7.0),
        ({"Retry-After": " 0.5 "}, 0.5),
        ({"Retry-After": "-3"}, 0.0),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:30 GMT", "Date": "Wed, 21 Oct 2026 07:28:00 GMT"}, 30.0),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT", "Date": "Wed, 21 Oct 2026 07:28:30 GMT"}, 0.0),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, None),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "nan"}, None),
        ({"Retry-After": "inf"}, None),
        ({"Retry-After": ""}, None),
        ({}, None),
    ],
)
def test_the_retry_after_header_of_a_server_is_parsed(headers, seconds):
    assert retry_after_s(headers) == seconds


@pytest.mark.parametrize(("asked_s", "waits"), [(0.0, (0.0, 1.0)), (30.0, (30.0, 30.0)), (9000.0, (60.0, 60.0))])
def test_a_full_engine_is_left_alone_for_its_stated_time_up_to_the_allowed_limit(asked_s, waits):
    endings = []

    async def refused():
        writer = SimpleNamespace(enqueue=endings.append)
        job = job_of(tasks_of([0]), [(plan(0),)], settings=SETTINGS)
        nothing = lambda *_: None  # noqa: E731
        shared = SharedState(job, writer, lambda: NOW_S, nothing, nothing, nothing)
        work = LeasedTask(Lease(0, 1, 1), "key", TaskRequest(0, "chat", {}), Draft())
        LeaseSettler(shared, lambda: None).retry_later(work, "http 503", None, asked_s)

    asyncio.run(refused())
    (ending,) = endings
    assert ending.state == State.READY
    assert not ending.counts
    assert waits[0] <= ending.not_before_s - NOW_S <= waits[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "seconds"),
    [
        ({"kind": "full", "retry_after_s": 7.0}, 7.0),
        ({"kind": "status", "status": 429, "retry_after_s": 2.5}, 2.5),
        ({"kind": "full"}, 0.0),
    ],
)
def test_an_engines_wish_comes_with_its_refusal(tmp_path, fault, seconds):
    async def requested():
        launcher = local(tmp_path, ("m0",))
        engine = await launcher.start(plan(0), (0,))
        try:
            ((url, _),) = engines(launcher)
            await asyncio.to_thread(post, url, "/emulator/faults", {"incoming": [fault]})
            ask = TaskRequest(0, "completions", {"prompt": "x", "max_tokens": 4, "temperature": 0})
            with pytest.raises(FailedError) as refused:
                await engine.generate(ask, Draft())
            assert (await engine.generate(ask, Draft())).output_tokens == 4
            return refused.value
        finally:
            await launcher.close()

    error = asyncio.run(requested())
    assert error.fault is Fault.BUSY
    assert error.retry_after_s == seconds
