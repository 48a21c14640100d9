"""What another router would have gained, on simulated engines, with prompts and sessions of which all is known."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from passed_traffic import batch_engine, row

from lengthwise.engine import simulate
from lengthwise.gateway.config import OWN_ROUTER
from lengthwise.gateway.observe import of_rows, routing_gain, routing_text
from lengthwise.gateway.observe.replay import Service, deployment_of
from lengthwise.gateway.observe.routing_gain import CENTRAL, recorded_workload
from lengthwise.report.json_file import json_text
from lengthwise.schema.deployment import Scheduler
from lengthwise.schema.errors import InputError, PolicyError, UnknownNameError
from lengthwise.workload.session_rows import Call, workload_of

ENGINES = Service(0.01, 0.0002, 0.0004, 0.0, max_num_seqs=16, engines=3, waited_share=0.0, error=0.0)
LEVELS = tuple(range(64, 1537, 64))


def shared_prompts(n: int, *, rate_rps: float, router: str = "least_outstanding"):
    """Rows of requests that begin with texts of 1,536 tokens, served by engines that cache prefixes.

    Every 15 requests one of 12 texts is replaced by a new one.
    """
    rng = np.random.default_rng(5)
    arrival_s = np.cumsum(rng.exponential(1 / rate_rps, n))
    group, output = np.arange(n) // 15 + rng.integers(0, 12, n), rng.integers(5, 40, n)
    prompt = 1536 + rng.integers(1, 60, n)
    prefixes = [tuple((tokens, 2000 * int(g) + tokens) for tokens in LEVELS) for g in group]
    rows = [
        row(i, arrival_s[i], prompt[i], output[i], output[i], *[arrival_s[i]] * 3, prefix=prefixes[i]) for i in range(n)
    ]
    workload = recorded_workload(of_rows(rows))
    scheduler = Scheduler(router=router, memory="paged_by_chunk")
    r = simulate(workload, deployment_of(workload, ENGINES, scheduler, caches_prefixes=True)).requests
    served = [
        replace(
            rows[i],
            worker=f"w{r.replica[i]}",
            first_token_s=float(r.first_token_s[i] + arrival_s[0]),
            finished_s=float(r.finished_s[i] + arrival_s[0]),
            cached_tokens=float(r.cached_tokens[i]),
        )
        for i in range(n)
    ]
    return served, r


@pytest.fixture(scope="module")
def traffic():
    return shared_prompts(1500, rate_rps=7.0)


def jct(rows_and_records) -> float:
    _, r = rows_and_records
    return float((r.finished_s - r.arrival_s).mean())


def test_a_router_that_follows_prefixes_gains_what_it_gains(traffic) -> None:
    rows, _ = traffic
    names = ["uncached_load", "least_outstanding", CENTRAL]
    found = routing_gain(of_rows(rows), names)
    by_name = {one.name: one for one in found.routers}
    assert list(by_name) == [CENTRAL, "uncached_load", "least_outstanding"]
    best, plain = by_name["uncached_load"], by_name["least_outstanding"]
    assert found.observed_jct_s[0] == pytest.approx(jct(traffic))
    assert plain.jct_s[0] == pytest.approx(found.observed_jct_s[0], rel=0.25), "the recorded router, as fitted"
    true = jct(shared_prompts(1500, rate_rps=7.0, router="uncached_load")) / jct(
        shared_prompts(1500, rate_rps=7.0, router=CENTRAL)
    )
    assert best.jct[0].value == pytest.approx(true - 1, abs=0.1)
    assert best.jct[0].low < true - 1 < best.jct[0].high < 0
    assert best.ttft[0].high < 0
    assert best.cached_share > plain.cached_share + 0.1
    assert found.description.startswith("uncached_load changes the mean JCT")


def test_the_report_has_every_router_and_what_is_not_known(traffic) -> None:
    rows, _ = traffic
    found = routing_gain(of_rows(rows), draws=20)
    text = routing_text(found)
    assert [one.name for one in found.routers[1:]] == [
        "least_outstanding", "cache_aware", "prefix_approximate", "uncached_work", "uncached_load",
    ]  # fmt: skip
    for name in ("observed", *(one.name for one in found.routers)):
        assert text.count(f"\n{name} ") == 2
    assert "Assumptions:" in text
    assert "reported cached tokens for 100 % of the requests" in text
    values = json.loads(json_text("routing_gain", vars(found) | {"services": [], "routers": []}))
    assert values["format"] == "lengthwise.routing_gain"
    assert routing_gain(of_rows(rows), draws=20) == found
    more = routing_gain(of_rows(rows), ["all", "round_robin", "cache_aware"], draws=20)
    assert [one.name for one in more.routers] == [*(one.name for one in found.routers), "round_robin"]


def test_cached_tokens_that_no_engine_reports_are_estimated_from_the_beginnings(traffic) -> None:
    rows, _ = traffic
    silent = [replace(one, cached_tokens=math.nan) for one in rows]
    known, estimated = (routing_gain(of_rows(some), ["uncached_load"], draws=20) for some in (rows, silent))
    assert estimated.services[0].prompt_s == pytest.approx(known.services[0].prompt_s, rel=0.2)
    assert "for 0 % of the requests; for the others" in routing_text(estimated)


def test_engines_with_little_memory_have_less_cached(traffic) -> None:
    rows, _ = traffic
    small = [replace(one, kv_tokens=6_000) for one in rows]
    found, known = (routing_gain(of_rows(some), ["uncached_load"], draws=20) for some in (small, rows))
    assert found.routers[1].cached_share < known.routers[1].cached_share - 0.05
    assert found.routers[1].ttft_s[0] > known.routers[1].ttft_s[0]
    assert "KV caches of 6,000 tokens" in routing_text(found)
    assert "evict nothing" in routing_text(known)


def test_sessions_are_followed() -> None:
    """Sixty chats of five turns, whose prompts grow by 300 tokens a turn beyond the last output."""
    rng = np.random.default_rng(3)
    calls = []
    for chat, start_s in enumerate(np.cumsum(rng.exponential(0.7, 60))):
        prompt = 400
        for turn in range(5):
            output, number = int(rng.integers(5, 60)), len(calls)
            later = {"parents": [number - 1], "delay_s": 2.0, "previous_turn": number - 1} if turn else {}
            calls.append(Call(None, float(start_s), prompt, output, chat, **later))
            prompt += output + 300
    workload = workload_of(None, calls, name="chats", block_tokens=16)
    scheduler = Scheduler(router="round_robin", memory="paged_by_chunk")
    r = simulate(workload, deployment_of(workload, ENGINES, scheduler, caches_prefixes=True)).requests
    rows = []
    for i, (chat, prompt) in enumerate(zip(workload.extra["session"], workload.prompt_tokens.tolist(), strict=True)):
        prefix = tuple((64 * k, 1000 * int(chat) + k) for k in range(1, prompt // 64 + 1))
        times = (r.arrival_s[i], prompt, r.output_tokens[i], 30, r.arrival_s[i], r.first_token_s[i], r.finished_s[i])
        rows.append(row(i, *times, worker=f"w{r.replica[i]}", session=int(chat) + 1, prefix=prefix))
    recorded = recorded_workload(of_rows(rows))
    assert (recorded.prefixes.turns >= 0).sum() == 240
    assert recorded.after.delay_s.max() == pytest.approx(2.0)
    found = routing_gain(of_rows(rows), ["session_affinity", "round_robin"], draws=20)
    _, affine, turns = found.routers
    assert affine.cached_share > turns.cached_share + 0.2
    assert affine.ttft_s[0] < turns.ttft_s[0]
    assert turns.cached_share == pytest.approx(r.cached_tokens.sum() / workload.prompt_tokens.sum(), abs=0.1)


@pytest.mark.parametrize(
    ("name", "change", "kind", "message"),
    [
        ("cache-aware", {}, UnknownNameError, "Did you mean: cache_aware"),
        (OWN_ROUTER, {}, PolicyError, "is a router of the gateway; the simulator has cache_aware, central, "),
        ("cache_aware", {"prefix": ()}, InputError, "the journal has none: gateways record"),
        ("session_affinity", {}, InputError, "X-Session-Id"),
    ],
)
def test_a_router_that_cannot_be_judged_is_refused_with_one_message(name, change, kind, message) -> None:
    rows = [replace(one, **change) for one in batch_engine(ENGINES, 1, 20, 5.0)]
    rows = [replace(one, prefix=change.get("prefix", ((64, 1),))) for one in rows]
    with pytest.raises(kind, match=message):
        routing_gain(of_rows(rows), [name])


def test_one_engine_leaves_no_choice() -> None:
    rows = batch_engine(replace(ENGINES, engines=1), 1, 220, 5.0)
    found = routing_gain(of_rows(rows), ["least_outstanding"])
    assert (found.routers, found.requests) == ((), 220)
    assert "one engine only" in routing_text(found)
    assert "at least 200" in routing_gain(of_rows(rows[:100]), ["least_outstanding"]).description
