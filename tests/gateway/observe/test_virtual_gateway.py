"""Predictions of the virtual gateway: against times by hand, and against the complete gateway over HTTP."""

from __future__ import annotations

import asyncio
import math
import socket
from contextlib import AsyncExitStack
from dataclasses import replace

import numpy as np
import pytest

from lengthwise.apps.launch.simulated import run_virtually
from lengthwise.engine.continuous_batching import Limits
from lengthwise.gateway.config import Engine, GatewayConfig, Listen, Order, PredictionConfig, bind_socket
from lengthwise.gateway.observe.gain_monitor import loss_warning
from lengthwise.gateway.observe.ordering_gain import BAD_FIT, OUT_OF_ORDER, as_json, gain, text_report
from lengthwise.gateway.observe.replay import FCFS, WINDOWED, Service, VirtualGateway, Withheld, matched, workload_of
from lengthwise.gateway.observe.trace import of_journal
from lengthwise.schema.workload import Workload
from lengthwise.testing.engine_server import EngineServer, EngineSpec, LinearSteps

STEP_S, WINDOW = 0.01, 5


def service(**changes):
    """One engine with one slot, whose prompts and ways take no time."""
    return replace(Service(STEP_S, 0.0, 0.0, 0.0, 1, 1, math.nan, 0.0), **changes)


def workload(*lengths, predicted=None):
    """Requests that arrive a thousandth of a step apart."""
    n = len(lengths)
    arrival_s = 1e-3 * STEP_S * np.arange(n)
    return Workload(arrival_s, np.ones(n, np.int64), np.array(lengths), np.array(predicted or lengths, float))


def finished_steps(made, of, order, **more):
    """When each request finishes, in steps."""
    return pytest.approx((made.arrival_s + VirtualGateway(made, of, order, **more).run().jct_s) / STEP_S)


def windowed(**changes):
    return replace(Order(WINDOWED, window_tokens=WINDOW, max_wait_s=math.inf), **changes)


def test_first_come_first_served_loses_no_step():
    assert finished_steps(workload(10, 10), service(), Order(FCFS)) == [10, 20]


LONG_FIRST = workload(10, 4, predicted=[12, 4])  # the long one starts, and has the longer predicted rest


def test_each_preemption_costs_the_step_in_which_the_slot_is_empty():
    assert finished_steps(LONG_FIRST, service(), windowed()) == [15, 10]


def test_a_preempted_request_pays_way_prompt_and_output_again():
    of = service(prompt_s=STEP_S, front_s=2 * STEP_S)
    # A start takes the way of two steps (during which a slot is empty anyway), and a step for each token of context.
    long, short, rest = 2 + 1 + 5, 2 + 1 + 4, 2 + (1 + 5) + 5
    assert [long + short + rest, long + short] == finished_steps(LONG_FIRST, of, windowed())


def test_a_preemption_waits_for_the_text_of_withheld_tokens():
    assert finished_steps(LONG_FIRST, service(), windowed(), withheld=Withheld(1.0, 0.0)) == [6 + 1 + 4 + 4, 6 + 1 + 4]


def test_a_request_that_returns_at_once_runs_for_a_window_after_each_empty_step():
    made = workload(14, 30, predicted=[14, 30])
    finished = finished_steps(made, service(), windowed(), withheld=Withheld(1.0, 0.0))
    assert finished == [6 + 1 + 6 + 1 + 2, 6 + 1 + 6 + 1 + 2 + 30]


@pytest.mark.parametrize("front_s", [0.0, 0.003, 0.025])
def test_the_match_reproduces_the_time_at_engines(front_s):
    """To a step, also from costs that are too high, as those that include the wait for a step."""
    made = workload(*np.random.default_rng(0).integers(1, 40, 60).tolist())
    of = service(max_num_seqs=4, seq_s=1e-4, prompt_s=1e-4, front_s=front_s)

    def at_engine_s(one):
        run = VirtualGateway(made, one, Order(FCFS)).run()
        return float((run.jct_s - run.queued_for_s).mean())

    found = matched(replace(of, front_s=front_s + STEP_S, step_s=1.02 * STEP_S), [made], at_engine_s(of))
    assert at_engine_s(found) == pytest.approx(at_engine_s(of), abs=STEP_S)  # it grows by steps


# The complete gateway
def served(folder, mode, lengths, arrivals, *, batch=2):
    """Journal of a complete gateway before two emulated engines, JCT of its clients, and the engines' prompts."""
    import aiohttp

    from lengthwise.gateway.serve import Gateway

    path = str(folder / f"{mode}.jsonl")
    prompts = [f"Write {n} words about request {i}." for i, n in enumerate(lengths)]

    async def run():
        loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            spec = EngineSpec("toy", limits=Limits(max_num_seqs=batch), steps=LinearSteps(STEP_S, 0.001, 0.0001))
            engines = [await stack.enter_async_context(EngineServer(spec)) for _ in range(2)]
            config = GatewayConfig(
                engines=tuple(Engine(one.url, concurrency=batch, generation_defaults="none") for one in engines),
                order=Order(mode, window_tokens=WINDOW, max_wait_s=math.inf),
                prediction=PredictionConfig(predictor="none"),
                listen=Listen(port=0, admin_port=None, journal=path),
            )
            gateway = await stack.enter_async_context(Gateway(config, clock=loop.time))
            assert await gateway.fleet.wait_checked(30.0)
            session = await stack.enter_async_context(aiohttp.ClientSession())
            start_s = loop.time()

            async def post(prompt, tokens, due_s):
                await asyncio.sleep(start_s + due_s - loop.time())
                body = {"model": "toy", "prompt": prompt, "stream": True, "temperature": 0, "max_tokens": 200}
                body["vllm_xargs"] = {"output_tokens": tokens, "max_tokens": 200}
                url = f"http://127.0.0.1:{gateway.port}/v1/completions"
                async with session.post(url, json=body) as response:
                    assert response.status == 200
                    await response.read()
                return loop.time() - start_s - due_s

            jct_s = await asyncio.gather(*map(post, prompts, lengths, arrivals))
            await gateway.drain()
            entries = [entry for one in engines for entry in one.log.entries]
            firsts = {
                entry.body["prompt"]: len(entry.prompt_ids) for entry in entries if entry.body["prompt"] in prompts
            }
        return np.array(jct_s), [firsts[prompt] for prompt in prompts]

    jct_s, engine_prompts = run_virtually(run())
    return of_journal(path), jct_s, engine_prompts


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Bursts of 24 requests under each mode."""
    rng = np.random.default_rng(3)
    lengths, arrivals = rng.geometric(1 / 25, 24).clip(1, 200).tolist(), np.sort(rng.uniform(0, 0.3, 24)).tolist()
    folder = tmp_path_factory.mktemp("journals")
    return {mode: served(folder, mode, lengths, arrivals) for mode in (FCFS, WINDOWED)}


def test_rows_count_prompts_as_the_engine_does_even_after_preemptions(runs):
    trace, _, prompts = runs[WINDOWED]
    assert not trace.is_uninterrupted.all()
    assert trace.prompt_tokens.tolist() == prompts


def test_virtual_time_gives_clients_the_times_of_the_journal(runs):
    for trace, jct_s, _ in runs.values():
        assert jct_s == pytest.approx(trace.jct_s, abs=1e-6)


def test_equal_runs_in_virtual_time_take_equal_times(tmp_path):
    times = [served(tmp_path, WINDOWED, [12, 7, 9, 3], [0.0, 0.01, 0.02, 0.03], batch=1)[1] for _ in range(2)]
    assert times[0] == pytest.approx(times[1], abs=1e-9)


def test_the_virtual_gateway_predicts_the_complete_one(runs):
    """From the run under FCFS it predicts mode windowed, which takes far longer, within 5 %."""
    fcfs, observed = runs[FCFS][0], runs[WINDOWED][0].jct_s.mean()
    of = Service(STEP_S, 0.001, 0.0001, 0.0, 2, 2, math.nan, 0.0)
    made = replace(workload_of(fcfs, WINDOW), predictions=None)
    of = matched(of, [made], float((fcfs.finished_s - fcfs.dispatched_s).mean()))
    predicted = np.mean(
        [VirtualGateway(made, of, windowed(), Withheld(0.16, 0.43), s).run().jct_s.mean() for s in range(4)]
    )
    assert VirtualGateway(made, of, Order(FCFS)).run().jct_s.mean() == pytest.approx(fcfs.jct_s.mean(), rel=0.02)
    assert observed > 1.15 * fcfs.jct_s.mean()
    assert predicted == pytest.approx(observed, rel=0.05)


def long_enough(folder, mode):
    """A trace that suffices for a report."""
    rng = np.random.default_rng(1)
    lengths, arrivals = rng.geometric(1 / 12, 220).clip(1, 99).tolist(), np.sort(rng.uniform(0, 8, 220)).tolist()
    return served(folder, mode, lengths, arrivals)[0]


@pytest.fixture(scope="module")
def day(tmp_path_factory):
    """A trace under FCFS."""
    return long_enough(tmp_path_factory.mktemp("day"), FCFS)


def test_a_report_prices_windowed_if_it_is_in_use(day):
    found = gain(day, windowed(), draws=8)
    order = found.order(WINDOWED)
    assert order.mean.low > 0
    verdict = f"windowed, which is in use, is slower than fcfs: it changes mean JCT by {100 * order.mean.value:+.1f} %"
    assert verdict in found.description
    assert order.mean_jct_s / order.fcfs_s[0] - 1 == pytest.approx(order.mean.value)
    assert order.p99_jct_s / order.fcfs_s[1] - 1 == pytest.approx(order.p99.value)
    *_, own, row = [line for line in text_report(found).splitlines() if " s  " in line]
    assert own.startswith("fcfs (of the last requests)")
    assert f"{order.fcfs_s[0]:.3f} s" in own
    assert row.startswith("windowed")
    assert all(one.name != WINDOWED for one in gain(day, Order(), draws=2).orders)
    estimate = {"decision": "no gain found"}
    estimate["orders"] = [{"name": WINDOWED, "mean": {"value": 0.2, "low": 0.1, "high": 0.3}}]
    line = loss_warning(estimate, WINDOWED)
    assert line is not None
    assert line[0] % line[1:] == "mode windowed is slower than fcfs: mean JCT +20 % (+10 to +30). Use another mode"


def test_a_gateway_in_mode_windowed_estimates_it_from_its_own_traffic(tmp_path):
    found = gain(long_enough(tmp_path, WINDOWED), windowed(), draws=8)
    assert found.decision == OUT_OF_ORDER  # preempted, although first dispatches have the order of arrival
    assert found.order(WINDOWED).mean.low > 0


@pytest.mark.parametrize("in_order", [True, False])
def test_no_estimate_of_windowed_on_engines_that_do_not_behave_as_fitted(day, in_order):
    """A fifth of the requests stands still for a minute, as no fitted engine does."""
    i = np.arange(len(day))
    trace = replace(day, finished_s=day.finished_s + np.where(i % 5, 0.0, 60.0))
    if not in_order:  # the earlier half of the requests was dispatched last, and preempted
        early = i < len(day) // 2
        trace = replace(trace, dispatched_s=trace.dispatched_s + 20.0 * early, is_uninterrupted=~early)
    found = gain(trace, windowed(), draws=4)
    assert found.in_order is in_order
    assert all(one.name != WINDOWED for one in found.orders)
    assert f"no estimate: the mean JCT of simulated {FCFS if in_order else WINDOWED} is off by -" in found.description
    assert loss_warning(as_json(found), WINDOWED) is None


def test_no_warning_where_the_interval_holds_zero_or_the_mode_was_not_simulated():
    mean = {"value": 0.1, "low": -0.1, "high": 0.3}
    estimate = {"decision": "no gain found", "orders": [{"name": WINDOWED, "mean": mean}]}
    assert loss_warning(estimate, WINDOWED) is None
    assert loss_warning(estimate | {"orders": [{"name": WINDOWED, "mean": mean | {"low": None}}]}, WINDOWED) is None
    assert loss_warning(estimate | {"orders": []}, "isrtf") is None
    loss = {"orders": [{"name": "isrtf", "mean": mean | {"low": 0.05}}]}
    assert loss_warning(estimate | loss, "isrtf") is not None
    assert loss_warning(estimate | loss | {"decision": BAD_FIT}, "isrtf") is None


def test_accepted_connections_send_small_chunks_at_once():
    """Without TCP_NODELAY the last chunk of a stream may wait for an acknowledgment of up to 40 ms."""

    async def option():
        accepted = asyncio.get_running_loop().create_future()
        with bind_socket("127.0.0.1", 0, "port") as listener:
            server = await asyncio.start_server(lambda _, writer: accepted.set_result(writer), sock=listener)
            _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
            other = await accepted
            found = other.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            writer.close()
            other.close()
            server.close()
        return found

    assert asyncio.run(option())
