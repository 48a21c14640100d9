"""The plug-in in a real vLLM: shorter first, the same answers, nothing lost; measured against the stock order.

The stock engine runs first and alone: what it answers and how long it takes is what the other is held to.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

import numpy as np
import pytest
from plugin_engines import PLUGIN, Job, additional, burst, bursting, lengthwise, metric, taken, vllm

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SLOTS = 2
SHAPE = ("--max-num-seqs", str(SLOTS), "--block-size", "32", "--num-gpu-blocks-override", "35")
"""1,088 tokens of KV cache: two requests of LONGEST do not fit."""
LONG, LONGEST, SHORT = 200, 700, 15


def mixed(n: int = 64, seed: int = 0) -> list[Job]:
    """Requests of which each tells its length."""
    lengths = np.random.default_rng(seed).lognormal(3.6, 0.9, n).clip(4, 250).astype(int).tolist()
    return [Job(f"m{k}", tokens, lengthwise(tokens)) for k, tokens in enumerate(lengths)]


def long(n: int, **report: object) -> list[Job]:
    return [Job(f"long{k}", LONG, lengthwise(LONG, **report)) for k in range(n)]


def blockers() -> tuple[Job, ...]:
    """Of a better class, so that no request takes their slots: until they end all others have come."""
    reported = lengthwise(LONG, lengthwise_class=-1)
    return tuple(Job(f"blocker{k}", LONG, reported) for k in range(SLOTS))


def short(n: int) -> list[Job]:
    return [Job(f"short{k}", SHORT, lengthwise(SHORT)) for k in range(n)]


def names(jobs: list[Job]) -> set[str]:
    return {job.name for job in jobs}


@pytest.fixture(scope="module")
def stock(tiny, engine_python):
    """What an engine without the plug-in does: a burst of all kinds, alone and at once."""
    with vllm(engine_python, tiny, tiny.parent / "stock.log", *SHAPE) as engine:
        burst(engine.url, mixed(8, seed=9))
        return {"mixed": burst(engine.url, mixed()), "queue": burst(engine.url, short(6), head=tuple(long(7)))}


@pytest.fixture(scope="module")
def engine(tiny, engine_python, stock):
    settings = additional(preemption="worth(factor=1)", window_tokens=10, max_wait_s=20.0)
    with vllm(engine_python, tiny, tiny.parent / "plugin.log", *SHAPE, *PLUGIN, *settings) as engine:
        burst(engine.url, mixed(8, seed=9))
        yield engine


def test_the_stock_engine_answers_in_order_of_arrival(stock):
    assert stock["queue"].places(names(short(6))) > 6


def test_short_ones_go_before_long_ones_that_came_first_and_greedy_output_is_the_same(engine, stock):
    found = burst(engine.url, short(6), head=tuple(long(7)))
    assert "lengthwise orders this engine" in engine.log_path.read_text()
    assert set(found.finished[:6]) == names(short(6))
    assert found.texts == stock["queue"].texts
    assert all(len(set(text)) > 8 for text in found.texts.values())


def test_the_shorter_half_of_a_burst_comes_early(engine, stock):
    before = metric(engine.url, "vllm:num_preemptions_total")
    found, fcfs = burst(engine.url, mixed()), stock["mixed"]
    assert found.texts == fcfs.texts
    print(
        f"\nmean JCT of 64 at once: FCFS {fcfs.mean_s:.2f} s, plug-in {found.mean_s:.2f} s "
        f"({found.mean_s / fcfs.mean_s:.2f} x); last at {max(fcfs.seconds.values()):.1f} and "
        f"{max(found.seconds.values()):.1f} s; preemptions "
        f"{metric(engine.url, 'vllm:num_preemptions_total') - before:g}"
    )
    # By order alone, however busy the machine is: mean place of the shorter half, of 63.
    shorter = names(sorted(mixed(), key=lambda job: job.tokens)[:32])
    assert found.places(shorter) < 20
    assert fcfs.places(shorter) > 25


def test_running_long_ones_give_way_and_their_output_is_that_of_an_uncut_one(engine):
    before = metric(engine.url, "vllm:num_preemptions_total")
    running = tuple(Job(f"long{k}", 480, lengthwise(480)) for k in range(SLOTS))
    found = burst(engine.url, short(4), head=running, head_s=0.2)
    assert metric(engine.url, "vllm:num_preemptions_total") > before
    assert set(found.finished[:4]) == names(short(4))
    alone = {job.name: burst(engine.url, [job]).texts[job.name] for job in running}
    assert {name: found.texts[name] for name in alone} == alone


def test_where_memory_runs_out_the_longest_leaves_and_its_output_is_that_of_an_uncut_one(engine):
    before = metric(engine.url, "vllm:num_preemptions_total")
    first, then = Job("first", LONGEST, lengthwise(LONGEST)), Job("then", 560, lengthwise(560))
    found = burst(engine.url, [first, then])  # side by side, until both have some 530 tokens
    assert metric(engine.url, "vllm:num_preemptions_total") > before
    assert found.finished == ["then", "first"]
    assert found.texts["first"] == burst(engine.url, [first]).texts["first"]


def test_a_class_goes_before_lengths(engine):
    urgent = [Job(f"urgent{k}", LONG, lengthwise(LONG, lengthwise_class=-1)) for k in range(2)]
    found = burst(engine.url, [*urgent, *short(6)], head=tuple(long(SLOTS)))
    first = min(found.finished.index(job.name) for job in urgent)
    assert all(found.finished.index(job.name) > first for job in short(6))


@pytest.mark.parametrize(
    "report",
    [
        {},
        {"vllm_xargs": {"lengthwise_predicted": "many"}},
        {"vllm_xargs": {"lengthwise_predicted": -1}},
        {"vllm_xargs": {"lengthwise_predicted": [1, 2]}},
        {"vllm_xargs": {"lengthwise_predicted": 10**18}},
        lengthwise(LONG, lengthwise_later=[50, 1, 20], lengthwise_class="high"),
    ],
)
def test_rubbish_is_no_reason_to_fail_or_to_go_first(engine, report):
    odd = [Job(f"odd{k}", LONG, report) for k in range(2)]
    found = burst(engine.url, [*odd, *short(4)], head=blockers())
    assert found.refusals == {}
    assert len(found.finished) == SLOTS + 6
    assert min(found.finished.index(job.name) for job in odd) > max(found.finished.index(f"short{k}") for k in range(4))
    assert "ordering failed" not in engine.log_path.read_text()


def test_a_disconnected_request_is_aborted_waiting_or_running(engine):
    import aiohttp

    async def left() -> None:
        async with aiohttp.ClientSession() as session:
            jobs = [Job(f"gone{k}", 900, lengthwise(900)) for k in range(12)]
            asking = [
                asyncio.ensure_future(session.post(f"{engine.url}/v1/completions", json=job.body())) for job in jobs
            ]
            await asyncio.sleep(1.0)
            for one in asking:
                one.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    asyncio.run(left())
    end_s = time.monotonic() + 10
    states = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    while sum(metric(engine.url, name) for name in states) and time.monotonic() < end_s:
        time.sleep(0.1)
    assert [metric(engine.url, name) for name in states] == [0, 0]
    assert burst(engine.url, short(3)).refusals == {}


def test_the_gateway_sends_lengths_and_refuses_clients_that_send_their_own(engine):
    from lengthwise.gateway.config import Engine, GatewayConfig, Listen, Order, PredictionConfig
    from lengthwise.gateway.serve import Gateway

    config = GatewayConfig(
        engines=(Engine(engine.url),),
        listen=Listen(port=0, admin_port=None),
        order=Order(mode="engine-plugin"),
        prediction=PredictionConfig(predictor="none"),
    )
    lies = {"vllm_xargs": {"lengthwise_predicted": 1, "lengthwise_class": -9}}
    first, then = [Job(f"long{k}", LONG) for k in range(14)], [Job(f"short{k}", SHORT) for k in range(4)]

    async def work():
        async with Gateway(config) as gateway:
            assert await gateway.fleet.wait_checked(20.0)
            url = f"http://127.0.0.1:{gateway.port}"
            async with taken(engine.url, SLOTS, 480, lengthwise(LONG, lengthwise_class=-1)) as max_num_seqs:
                found = await bursting(url, then, tuple(first), max_num_seqs=max_num_seqs)
            return found, await bursting(url, [Job("liar", SHORT, lies)])

    found, liar = asyncio.run(work())
    assert found.refusals == {}
    assert set(liar.refusals) == {"liar"}
    assert "vllm_xargs.lengthwise_" in str(liar.refusals["liar"])
    assert set(found.finished[:4]) == names(then)


def test_an_engine_killed_with_waiting_requests_exits_and_every_client_gets_an_error(engine):
    """The last test of this engine."""
    import os
    import signal
    import threading

    jobs = [Job(f"late{k}", 800, lengthwise(800)) for k in range(12)]

    def ask() -> None:
        with contextlib.suppress(BaseExceptionGroup):  # however it lets them down
            burst(engine.url, jobs)

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(1.0)
    os.killpg(engine.process.pid, signal.SIGKILL)
    assert engine.process.wait(20) == -signal.SIGKILL
    asking.join(20)
    assert not asking.is_alive()
