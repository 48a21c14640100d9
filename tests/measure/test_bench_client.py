"""What the client reports of itself: late, busy, or with two clocks that disagree."""

from __future__ import annotations

import asyncio
import time

import pytest

from lengthwise.measure.load import parse_metrics
from lengthwise.measure.load_client import MIN_P99_VALUES, Monitor, binomial_tail


def watched(rounds, work=lambda: None, late_s=(0.0,), median_ttft_s=1.0):
    """A watch that ran beside ``work``."""

    async def run():
        watch = Monitor()
        companion = asyncio.ensure_future(watch.run())
        for _ in range(rounds):
            await asyncio.sleep(0.025)
            work()
        await asyncio.sleep(0.025)
        companion.cancel()
        watch.close(late_s, median_ttft_s)
        return watch

    return asyncio.run(run())


def warnings(monitor):
    return " ".join(monitor.warnings())


def spin(seconds):
    """Keeps the processor busy for so much of its own time, however many others want it."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_a_client_that_was_in_time_raises_no_warning():
    assert "after they were due" not in warnings(watched(4, late_s=[0.001] * 100))


def test_lateness_is_judged_by_itself_and_by_the_latencies():
    late_s = [0.001] * 90 + [0.004] * 10
    assert "after they were due" not in warnings(watched(1, late_s=late_s))
    reported = warnings(watched(1, late_s=late_s, median_ttft_s=0.05))
    assert "10 of 100 requests (10.0 %) more than 2.5 ms after they were due (the worst 4.0 ms" in reported
    assert "after they were due" in warnings(watched(1, late_s=[0.012] * 10, median_ttft_s=10.0))
    fast = {"median_ttft_s": 0.004}  # 5 % of it are 0.2 ms, within which no loop wakes
    assert "after they were due" not in warnings(watched(1, late_s=[0.0009] * 100, **fast))
    assert "more than 1.0 ms after" in warnings(watched(1, late_s=[0.0011] * 100, **fast))


def test_one_late_request_of_sixty_is_recorded_without_a_warning():
    watch = watched(1, late_s=[0.0] * 59 + [0.5])
    assert "after they were due" not in warnings(watch)
    late = watch.metadata["late"]
    assert (late["count"], late["of"], late["surely_often"]) == (1, 60, False)
    assert watch.metadata["late_s"] == {"p50": 0.0, "p99": None, "max": 0.5}
    assert "3 of 60" in warnings(watched(1, late_s=[0.0] * 57 + [0.5] * 3))


def test_a_99th_percentile_is_reported_from_where_it_differs_from_the_largest():
    assert MIN_P99_VALUES == 299
    assert 0.99**298 > 0.05 >= 0.99**299
    assert watched(1, late_s=[0.001] * 299).metadata["late_s"]["p99"] == 0.001


def test_the_chance_of_late_requests_is_the_binomial_tail():
    binom = pytest.importorskip("scipy.stats").binom
    for of, count in ((10, 1), (60, 2), (60, 3), (1000, 16), (20_000, 240)):
        assert binomial_tail(count, of, 0.01) == pytest.approx(binom.sf(count - 1, of, 0.01), rel=1e-6)


def test_a_busy_client_is_recognized_by_its_own_share_of_a_core():
    watch = watched(3, lambda: spin(0.2))
    assert watch.metadata["loop_lag_s"]["max"] > 0.1
    share = watch.metadata["cpu_share"]
    assert ("% of a core busy" in warnings(watch)) == (share > 0.8)
    assert share > 5 * watched(10).metadata["cpu_share"] or share > 0.8


def test_a_wall_clock_that_jumps_is_reported(monkeypatch):
    real = time.time
    moved = []
    monkeypatch.setattr(time, "time", lambda: real() + sum(moved))
    watch = watched(1, lambda: moved.append(2.0))
    assert watch.metadata["clock_skew_s"] == pytest.approx(2.0, abs=0.05)
    assert "the wall clock moved by 2.0" in warnings(watch)


def test_metrics_are_summed_over_labels_and_buckets_left_out():
    text = (
        '# TYPE a gauge\na{x="1"} 2.0\na{x="2 }"} 3\nb_bucket{le="1"} 9\nb_sum 1e3\nb_created 5\n'
        "process_cpu 1\nc NaN\nd +Inf\nnonsense\n"
    )
    assert parse_metrics(text) == {"a": 5.0, "b_sum": 1000.0}


def test_histograms_of_step_tokens_are_retained_by_bucket():
    name = "vllm:iteration_tokens_total_bucket"
    text = "".join(
        f'{name}{{engine="{engine}",le="{bound}",model="m"}} {count}\n'
        for engine in (0, 1)
        for bound, count in (("8.0", 3), ("1e+06", 7), ("+Inf", 7))
    )
    reported = parse_metrics(text + 'vllm:time_to_first_token_seconds_bucket{le="8.0"} 2\n')
    assert reported == {f'{name}{{le="8"}}': 6.0, f'{name}{{le="1e+06"}}': 14.0}


def test_a_loop_that_wakes_late_is_warned_about_though_requests_left_in_time():
    def woken(lags, median_ttft_s):
        watch = watched(1, late_s=[0.001] * 100, median_ttft_s=median_ttft_s)
        watch.lags = lags
        watch.close([0.001] * 100, median_ttft_s)
        return warnings(watch)

    often = [0.0] * 95 + [0.2] * 5
    assert "the client woke more than 30 ms late in 5 of 100 checks (the worst 200 ms" in woken(often, 0.06)
    assert "woke" not in woken(often, 1.0)
    assert "woke" not in woken([0.0] * 99 + [0.2], 0.06)


def test_the_lateness_warning_is_recorded_in_the_metadata():
    late = watched(1, late_s=[0.5] * 100)
    assert late.metadata["late_doubt"] in late.warnings()
    assert watched(1, late_s=[0.0] * 100).metadata["late_doubt"] is None
