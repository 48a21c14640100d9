"""What the client says of itself: late, busy, or of two minds about the time."""

from __future__ import annotations

import asyncio
import time

import pytest

from lengthwise.measure.load._scrape import samples
from lengthwise.measure.load._watch import Watch


def watched(rounds, work=lambda: None, late_s=(0.0,)):
    """A watch that ran beside ``work``."""

    async def run():
        watch = Watch()
        beside = asyncio.ensure_future(watch.run())
        for _ in range(rounds):
            await asyncio.sleep(0.025)
            work()
        await asyncio.sleep(0.025)
        beside.cancel()
        watch.close(late_s)
        return watch

    return asyncio.run(run())


def doubts(watch, median_ttft_s=1.0):
    return " ".join(watch.doubts(median_ttft_s))


def spin(seconds):
    """Keeps the processor busy for so much of its own time, however many others want it."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_a_client_that_was_in_time_raises_no_doubt_of_it():
    assert "after they were due" not in doubts(watched(4, late_s=[0.001] * 100))


def test_lateness_is_judged_by_itself_and_by_the_latencies():
    watch = watched(1, late_s=[0.001] * 90 + [0.004] * 10)
    assert "after they were due" not in doubts(watch, median_ttft_s=1.0)
    assert "4.0 ms or more after they were due" in doubts(watch, median_ttft_s=0.05)
    assert "after they were due" in doubts(watched(1, late_s=[0.012] * 10), median_ttft_s=10.0)


def test_a_busy_client_is_told_by_its_own_share_of_a_core():
    watch = watched(3, lambda: spin(0.2))
    assert watch.facts["loop_lag_s"]["max"] > 0.1
    share = watch.facts["cpu_share"]
    assert ("% of a core busy" in doubts(watch)) == (share > 0.8)
    assert share > 5 * watched(10).facts["cpu_share"] or share > 0.8


def test_a_wall_clock_that_jumps_is_told(monkeypatch):
    real = time.time
    moved = []
    monkeypatch.setattr(time, "time", lambda: real() + sum(moved))
    watch = watched(1, lambda: moved.append(2.0))
    assert watch.facts["clock_skew_s"] == pytest.approx(2.0, abs=0.05)
    assert "the wall clock moved by 2.0" in doubts(watch)


def test_metrics_are_summed_over_labels_and_buckets_left_out():
    text = (
        '# TYPE a gauge\na{x="1"} 2.0\na{x="2 }"} 3\nb_bucket{le="1"} 9\nb_sum 1e3\nb_created 5\n'
        "process_cpu 1\nc NaN\nd +Inf\nnonsense\n"
    )
    assert samples(text) == {"a": 5.0, "b_sum": 1000.0}


def test_a_loop_that_wakes_late_is_doubted_though_requests_left_in_time():
    watch = watched(1, late_s=[0.001] * 100)
    watch.facts["loop_lag_s"]["p99"] = 0.2
    assert "the client woke up to 200 ms late" in doubts(watch, median_ttft_s=0.06)
    assert "woke up" not in doubts(watch, median_ttft_s=1.0)
