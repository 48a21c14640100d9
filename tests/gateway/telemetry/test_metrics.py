"""Metrics for Prometheus: by its conventions, adding up, of few series, at little cost a token."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
from traced_requests import request, run, serve

from lengthwise.gateway.config import Engine, GatewayConfig
from lengthwise.gateway.request import Outcome, Refusal
from lengthwise.gateway.scheduling import Signals, Statistics, WorkerStatistics
from lengthwise.gateway.telemetry import Telemetry

pytest.importorskip("prometheus_client")
NOW = Statistics(
    waiting=3,
    waiting_bytes=4096,
    running=5,
    oldest_wait_s=1.5,
    backlog_tokens=900.0,
    backlog_s=4.5,
    predicted_wait_s=0.7,
    ordering=True,
    preemptions=1,
    workers=(
        WorkerStatistics("a:1", True, 4, 8, 77.0, 600.0, Signals(running=4, waiting=0, kv_used=0.25)),
        WorkerStatistics('b"\n', False, 1, 8, 11.0, 300.0, Signals()),
    ),
)


NO_CAP = replace(NOW, waiting=0, workers=(replace(NOW.workers[0], limit=None), replace(NOW.workers[1], up=True)))
"""Its first engine is given all that come."""


def telemetry(tenants=("anonymous",), statistics=lambda: NOW) -> Telemetry:
    return Telemetry(GatewayConfig(engines=(Engine("http://e:1"),)), statistics=statistics, tenants=tenants)


def scraped(t: Telemetry) -> dict[str, dict[tuple, float]]:
    from prometheus_client import generate_latest
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, dict[tuple, float]] = {}
    for family in text_string_to_metric_families(generate_latest(t.metrics.registry()).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_an_engine_without_a_limit_has_no_limit_metric() -> None:
    t = telemetry(statistics=lambda: NO_CAP)
    assert scraped(t)["lengthwise_worker_limit"] == {(("worker", 'b"\n'),): 8}


def test_the_estimated_change_is_exported_with_its_interval() -> None:
    t = telemetry()
    assert "lengthwise_jct_change_ratio" not in scraped(t)
    mean = {"value": -0.2, "low": -0.3, "high": None}
    t.metrics.gain = lambda: {"orders": [{"name": "srtf", "mean": mean}]}
    assert scraped(t)["lengthwise_jct_change_ratio"] == {
        (("bound", "low"), ("order", "srtf")): -0.3,
        (("bound", "value"), ("order", "srtf")): -0.2,
    }
    t.metrics.gain = lambda: None
    assert "lengthwise_jct_change_ratio" not in scraped(t)


def test_everything_reported_is_read_back() -> None:
    t = telemetry()
    serve(t, request(1, 1.0, predicted=20.0), 1.5, 10, 0.02)
    t.refused("queue_full", Refusal(429, "queue_full", "full"), 0, "m")
    found = scraped(t)
    assert found["lengthwise_requests_total"] == {
        (("model", "m"), ("outcome", "finished"), ("tenant", "anonymous")): 1,
        (("model", "m"), ("outcome", "refused"), ("tenant", "anonymous")): 1,
    }
    of_m = (("model", "m"),)
    assert found["lengthwise_time_to_first_token_seconds_sum"][of_m] == pytest.approx(0.52)
    assert found["lengthwise_inter_token_latency_seconds_count"][of_m] == 9
    assert found["lengthwise_inter_token_latency_seconds_sum"][of_m] == pytest.approx(9 * 0.02)
    assert found["lengthwise_queue_seconds_sum"][of_m] == pytest.approx(0.5)
    assert found["lengthwise_request_seconds_sum"][of_m] == pytest.approx(0.7)
    ratios = {dict(key)["le"]: n for key, n in found["lengthwise_prediction_log_ratio_bucket"].items()}
    assert (ratios["0.4"], ratios["0.7"]) == (0, 1)  # ln 2
    assert found["lengthwise_output_tokens_total"][of_m] == 10
    assert found["lengthwise_refusals_total"] == {(("reason", "queue_full"),): 1}
    assert found["lengthwise_predictions_total"] == {(("source", "predictor"),): 1}
    assert found["lengthwise_queue_requests"] == {(): 3}
    assert found["lengthwise_backlog_seconds"] == {(): 4.5}
    assert found["lengthwise_worker_up"] == {(("worker", "a:1"),): 1, (("worker", 'b"\n'),): 0}
    assert found["lengthwise_worker_limit"][(("worker", "a:1"),)] == 8
    assert found["lengthwise_engine_kv_used_ratio"] == {(("worker", "a:1"),): 0.25}


def test_buckets_grow_to_the_count() -> None:
    t = telemetry()
    for number in range(50):
        serve(t, request(number, 0.0), 0.001 * 2**number % 3000, 3, 0.004 * (number + 1))
    buckets = scraped(t)["lengthwise_request_seconds_bucket"]
    edges = sorted((float(dict(key)["le"]), value) for key, value in buckets.items())
    counts = [value for _, value in edges]
    assert counts == sorted(counts)
    assert edges[-1] == (math.inf, 50)


def test_names_follow_the_conventions() -> None:
    t = telemetry()
    serve(t, request(1), 0.0, 3, 0.1)
    from prometheus_client import generate_latest

    text = generate_latest(t.metrics.registry()).decode()
    own = [line.split() for line in text.splitlines() if line.startswith("# TYPE lengthwise_")]
    assert len(own) > 25
    for _, _, name, kind in own:
        assert name.endswith("_total") == (kind == "counter")
        assert not name.endswith(("_ms", "_kb"))
    assert all(line.isascii() for line in text.splitlines())


def test_each_request_counts_under_one_outcome() -> None:
    t = telemetry()
    for number, outcome in enumerate(Outcome):
        if outcome is Outcome.REFUSED:
            t.refused("rate", Refusal(429, "rate", ""), 0, "m")
        else:
            q = request(number)
            t.on_admission(q)
            t.on_end(q, outcome, 1.0)
    assert sum(t.metrics.requests.values()) == len(Outcome)
    assert len(t.timelines) == 0


def test_a_model_gets_its_label_once_an_engine_serves_it() -> None:
    t, early = telemetry(), request(1000, model="real")
    t.on_admission(early)
    for number in range(100):  # before an engine is up, any name is admitted
        q = request(number, model=f"made up {number}")
        t.on_admission(q)
        t.on_end(q, Outcome.EXPIRED, 1.0)
    run(t, early, 2.0, 10, 0.02)
    found = scraped(t)
    assert {(dict(key)["model"], n) for key, n in found["lengthwise_requests_total"].items()} == {
        ("other", 100),
        ("real", 1),
    }
    for name in ("request", "time_to_first_token", "inter_token_latency"):
        assert found[f"lengthwise_{name}_seconds_count"][("model", "real"),] == (9 if "inter" in name else 1)


def test_tenants_and_models_make_few_series() -> None:
    t = telemetry(tenants=tuple(f"t{i}" for i in range(500)))
    for number in range(500):
        serve(t, request(number, tenant=number, model=f"m{number % 120}"), 0.0, 2, 0.01)
        t.refused("no such model", Refusal(404, "model", ""), number, f"made up {number}")
    found = scraped(t)
    labels = [dict(key) for key in found["lengthwise_requests_total"]]
    assert len({one["tenant"] for one in labels}) == 51
    assert len({one["model"] for one in labels}) == 51
    assert not any(one["model"].startswith("made up") for one in labels)
    assert sum(found["lengthwise_requests_total"].values()) == 1000
    assert len(found["lengthwise_time_to_first_token_seconds_count"]) == 51


def test_a_preemption_and_a_failover_are_counted_separately() -> None:
    t = telemetry()
    q = request(1)
    t.on_admission(q)
    t.dispatched(q, "a", 0.0)
    q.generated_tokens = 30
    t.requeued(q, "preemption", 1.0)
    t.dispatched(q, "a", 2.0)
    t.requeued(q, "failed_over", 2.5)
    t.dispatched(q, "b", 2.5)
    q.dispatch.preemptions = 1
    rows = []
    t.timelines.subscribe(rows.append)
    t.on_end(q, Outcome.FINISHED, 4.0)
    found = scraped(t)
    assert found["lengthwise_preemptions_total"] == {(): 1}
    assert found["lengthwise_failovers_total"] == {(): 1}
    assert found["lengthwise_resumed_tokens_total"] == {(): 60}
    assert (rows[0].failovers, rows[0].preemptions, rows[0].worker) == (1, 1, "b")
    assert rows[0].served_s == pytest.approx(3.0)


def test_a_token_costs_microseconds() -> None:
    t = telemetry()
    q = request(1)
    t.on_admission(q)
    t.first_token(q, 0.0)
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        for k in range(20_000):
            t.tokens(q, 1, 0.01 * k)
        best = min(best, (time.perf_counter() - start) / 20_000)
    assert best < 10e-6
