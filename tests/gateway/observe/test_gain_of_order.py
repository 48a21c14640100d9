"""The look back: true where the truth is known, and plain where there is nothing to tell."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
from passed_traffic import batch_engine, renamed, shortest_first, single_server, stuttering, true_change

from lengthwise.gateway.config import Order
from lengthwise.gateway.observe import (
    Change,
    Monitor,
    OrderGain,
    RecentRows,
    as_json,
    fit,
    gain,
    of_journal,
    of_rows,
    report,
    text_report,
)
from lengthwise.gateway.observe.ordering_gain import decide
from lengthwise.gateway.observe.replay import Service, workload_of
from lengthwise.gateway.telemetry import Journal

ENGINES = Service(0.02, 0.001, 0.0002, 0.0, max_num_seqs=8, engines=2, waited_share=0.0, error=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("reserved", [True, False])
def test_the_interval_holds_the_gain_of_theory(reserved: bool) -> None:
    found = gain(of_rows(single_server(3, 1500, reserved=reserved)), draws=30)
    truth = true_change()
    assert truth < -0.25
    oracle = found.order("oracle").mean
    assert oracle.low < truth < oracle.high
    assert oracle.high - oracle.low < 0.3
    assert abs(found.model_error) < 0.05
    assert found.decision == "switch on"
    assert found.order("srtf").mean == oracle
    assert found.services[0].max_num_seqs == 1
    assert [one.name for one in found.times] == ["fcfs", "srtf", "isrtf", "oracle"]
    assert found.times[0].jct_s[0] == found.fcfs_jct_s
    assert found.times[3].jct_s[::3] == (found.order("oracle").mean_jct_s, found.order("oracle").p99_jct_s)
    for one in found.times:  # the only slot serves as long, whatever the order
        assert one.jct_s[0] - one.queue_s[0] == pytest.approx(found.fcfs_jct_s - found.times[0].queue_s[0])


def test_engines_are_fitted_as_they_are() -> None:
    trace = of_rows(batch_engine(ENGINES, 1, 1500, rate_rps=4.6))
    fitted = fit(trace)
    assert (fitted.max_num_seqs, fitted.engines) == (8, 2)
    assert fitted.step_s == pytest.approx(ENGINES.step_s, rel=0.1)
    assert fitted.step_s + 8 * fitted.seq_s == pytest.approx(ENGINES.step_s + 8 * ENGINES.seq_s, rel=0.05)
    assert fitted.prompt_s == pytest.approx(ENGINES.prompt_s, rel=0.5)
    assert fitted.error < 0.05


def test_tokens_that_come_in_a_bunch_do_not_spoil_the_fit() -> None:
    rows = batch_engine(ENGINES, 1, 1000, rate_rps=4.6)
    bunched = [replace(row, first_token_s=row.finished_s - 1e-4) if row.id % 20 == 0 else row for row in rows]
    fitted = fit(of_rows(bunched))
    assert fitted.step_s + 8 * fitted.seq_s == pytest.approx(ENGINES.step_s + 8 * ENGINES.seq_s, rel=0.2)
    assert fitted.max_num_seqs == 8


@pytest.mark.parametrize("every", [2, 5])
def test_non_streamed_answers_do_not_distort_the_fit(every: int) -> None:
    """One of so many is streamed."""
    rows = batch_engine(ENGINES, 1, 1500, rate_rps=4.6)
    some = [row if row.id % every == 0 else replace(row, first_token_s=math.nan) for row in rows]
    fitted, streamed = fit(of_rows(some)), fit(of_rows(rows))
    assert fitted.max_num_seqs == 8
    assert fitted.step_s + 8 * fitted.seq_s == pytest.approx(ENGINES.step_s + 8 * ENGINES.seq_s, rel=0.05)
    assert fitted.waited_share == pytest.approx(streamed.waited_share, abs=0.1)
    found, known = gain(of_rows(some), draws=10), gain(of_rows(rows), draws=10)
    assert found.requests == 1500
    assert found.decision == known.decision
    assert found.order("srtf").mean.value == pytest.approx(known.order("srtf").mean.value, rel=0.2)


def test_a_lack_of_streamed_answers_is_reported() -> None:
    rows = [replace(row, first_token_s=math.nan) for row in single_server(1, 250)]
    found = gain(of_rows(rows))
    assert (found.decision, found.requests, found.orders) == ("unknown: responses are not streamed", 250, ())
    assert "stream: true" in text_report(found)


@pytest.mark.parametrize("bunched", [0.0, 0.1])
def test_a_stuttering_machine_is_fitted_as_slow_as_it_is(bunched: float) -> None:
    """5 % of the time stands still 20 times as long: all takes 1.95 times as long in the mean."""
    rows = stuttering(batch_engine(ENGINES, 1, 1500, rate_rps=4.6), 0)
    rows = [replace(row, first_token_s=row.finished_s - 3e-5) if row.id % 10 < 10 * bunched else row for row in rows]
    fitted = fit(of_rows(rows))
    slower = (fitted.step_s + 8 * fitted.seq_s) / (ENGINES.step_s + 8 * ENGINES.seq_s)
    assert slower == pytest.approx(1 + 0.05 * 19, rel=0.15)
    assert fitted.error < 0.2
    assert fitted.max_num_seqs == 8


def test_few_long_stalls_do_not_spoil_the_fit() -> None:
    fitted = fit(of_rows(stuttering(batch_engine(ENGINES, 1, 1500, rate_rps=4.6), 0, share=0.001, times=500.0)))
    assert fitted.step_s == pytest.approx(ENGINES.step_s, rel=0.2)
    assert fitted.error < 0.1


def test_an_engines_own_queue_is_seen_too() -> None:
    found = gain(of_rows(batch_engine(ENGINES, 1, 1500, rate_rps=4.6)), draws=20)
    assert found.waited_share > 0.1
    assert abs(found.model_error) < 0.15
    assert found.decision == "switch on"
    assert found.order("oracle").mean.value < -0.1


def test_no_gain_without_a_queue() -> None:
    found = gain(of_rows(batch_engine(ENGINES, 2, 600, rate_rps=0.8)), draws=10)
    assert found.decision == "no gain possible: no request waits"
    assert found.services[0].max_num_seqs is None
    assert abs(found.order("oracle").mean.value) < 0.01


def test_too_little_traffic_is_reported() -> None:
    for n in (0, 1, 150):
        found = gain(of_rows(single_server(1, 150)[:n]))
        assert (found.decision, found.requests, found.orders) == ("not enough traffic", n, ())
        assert "not enough traffic" in text_report(found)


def test_uninformative_predictions_do_not_enable_reordering() -> None:
    rng = np.random.default_rng(0)
    rows = [replace(row, predicted_tokens=float(rng.lognormal(4, 1))) for row in single_server(4, 1500)]
    found = gain(of_rows(rows), draws=15)
    assert found.decision in ("no gain found", "not significant yet")
    assert found.order("oracle").mean.high < -0.1


def test_lengths_alike_gain_nothing() -> None:
    rows, end_s = [], 0.0
    for row in single_server(5, 400):
        start_s = max(row.arrival_s, end_s)
        end_s = start_s + row.prompt_tokens * 0.001 + 0.8
        sent = {"dispatched_s": start_s, "first_token_s": end_s - 0.79, "finished_s": end_s}
        rows.append(replace(row, output_tokens=80, predicted_tokens=80.0, queued_for_s=start_s - row.arrival_s, **sent))
    found = gain(of_rows(rows), draws=20)
    assert found.waited_share > 0.2
    assert found.decision == "no gain possible: lengths are alike"


def test_engines_that_do_something_else_are_not_judged() -> None:
    rows = single_server(6, 400, reserved=False)
    frozen = [replace(row, finished_s=row.finished_s + 60, first_token_s=row.first_token_s + 60) for row in rows]
    found = gain(of_rows(frozen), draws=5)
    assert found.decision in ("unknown: the engines do not behave as fitted", "no gain possible: no request waits")
    assert found.decision != "switch on"


def test_engines_that_replace_each_other_are_counted_once() -> None:
    """Names change as pods are rolled; no more engines serve for it."""
    rows = batch_engine(ENGINES, 1, 1500, rate_rps=4.6)
    rolled = of_rows(renamed(rows, 4))
    assert len(rolled.workers) == 8
    assert fit(rolled).engines == 2
    found, known = gain(rolled, draws=5), gain(of_rows(rows), draws=5)
    assert found.decision == known.decision == "switch on"
    assert found.order("oracle").mean.value == pytest.approx(known.order("oracle").mean.value, rel=0.2)


def test_engines_that_join_count_as_they_serve() -> None:
    rows = batch_engine(ENGINES, 1, 600, rate_rps=4.6)
    assert fit(of_rows([replace(row, worker="w0") if row.id < 200 else row for row in rows])).engines == 2
    assert fit(of_rows([replace(row, worker="w0") if row.id < 400 else row for row in rows])).engines == 1


def test_what_did_not_go_in_order_is_not_judged() -> None:
    """Shortest first as it was: no simulated first come, first served can be held against it."""
    rows = single_server(3, 600)
    found = gain(of_rows(shortest_first(rows)), draws=5)
    assert math.isnan(found.model_error)
    assert found.decision == "unknown: requests were not served first come, first served"
    assert "mode observe or fcfs" in text_report(found)


def test_a_request_dispatched_slightly_earlier_has_overtaken_none() -> None:
    """Two that come at once are sent in either order."""
    rows = single_server(3, 600, reserved=False)
    swapped = [replace(row, dispatched_s=row.dispatched_s + 1e-3 * (row.id % 2)) for row in rows]
    close = [replace(row, arrival_s=swapped[row.id - row.id % 2].arrival_s + 1e-4 * (row.id % 2)) for row in swapped]
    sent = [replace(row, dispatched_s=row.arrival_s + 1e-3 * (1 - row.id % 2)) for row in close]
    found = gain(of_rows(sent), draws=5)
    assert found.in_order
    assert found.decision != "unknown: requests were not served first come, first served"


@pytest.mark.parametrize(
    ("preemption_effect", "named"),
    [
        (Change(-0.03, -0.06, 0.005), "srtf"),
        (Change(-0.005, -0.008, -0.002), "srtf"),
        (Change(-0.03, -0.06, -0.01), "isrtf"),
    ],
)
def test_isrtf_is_named_only_where_it_surely_beats_srtf(preemption_effect: Change, named: str) -> None:
    """Beyond chance, and by enough to be worth cutting anybody."""
    found = gain(of_rows(single_server(3, 400)), draws=5)
    srtf = OrderGain("srtf", Change(-0.2, -0.3, -0.1), Change(0.0, -0.1, 0.1), 1.0, 2.0)
    isrtf = replace(srtf, name="isrtf", mean=Change(-0.23, -0.33, -0.13))
    decision, description = decide(
        replace(found, orders=(srtf, isrtf, found.order("oracle")), preemption_effect=preemption_effect)
    )
    assert decision == "switch on"
    assert description.startswith(f"mode = {named} ")
    assert description.count(" % to ") >= 2, "mean and 99th percentile have intervals"
    tail = Change(0.5, 0.4, 0.6)
    dear = (replace(srtf, p99=tail), replace(isrtf, p99=tail), found.order("oracle"))
    assert decide(replace(found, orders=dear, preemption_effect=preemption_effect))[1].startswith(f"mode = {named} ")
    only = (replace(srtf, p99=tail), isrtf, found.order("oracle"))
    assert decide(replace(found, orders=only, preemption_effect=preemption_effect))[1].startswith("mode = isrtf ")


def test_the_effect_of_preemption_is_reported_with_its_interval() -> None:
    rows = single_server(3, 1500)
    found = gain(of_rows(rows), Order(preemption="worth(factor=1)"), draws=20)
    srtf, isrtf = found.order("srtf").mean, found.order("isrtf").mean
    assert found.preemption_effect.value == pytest.approx((1 + isrtf.value) / (1 + srtf.value) - 1)
    assert found.preemption_effect.low < found.preemption_effect.value < found.preemption_effect.high < 0
    assert "against mode = srtf" in found.description
    assert gain(of_rows(rows), Order(preemption="never"), draws=5).preemption_effect == Change(0.0, 0.0, 0.0)


def test_separate_models_are_separate_pools() -> None:
    one = single_server(7, 300)
    other = [replace(row, id=1000 + row.id, model="n", worker="v") for row in batch_engine(ENGINES, 8, 300, 0.5)]
    found = gain(of_rows([*one, *other]), draws=5)
    assert len(found.services) == 2
    assert found.requests == 600
    both = [*one, *(replace(row, worker="w0") for row in other[:5])]
    assert len(gain(of_rows(both), draws=2).services) == 1


def test_pools_without_information_are_not_compared_with() -> None:
    """Requests whose engines are not simulated do not count as seen: of a few, and of answers that came whole."""
    one = single_server(7, 300)
    other = [
        replace(row, id=1000 + row.id, model="n", worker="v", finished_s=row.finished_s + 500)
        for row in batch_engine(ENGINES, 8, 300, 0.5)
    ]
    complete = [replace(row, first_token_s=math.nan) for row in other]
    alone = gain(of_rows(one), draws=2)
    for more in (other[:40], complete):
        found = gain(of_rows([*one, *more]), draws=2)
        assert (found.requests, found.observed_jct_s) == (300, alone.observed_jct_s)
        assert found.model_error == alone.model_error


def test_later_predictions_hold_from_the_window_in_which_they_came() -> None:
    rows = single_server(9, 200)
    first = replace(
        rows[0], output_tokens=260, predicted_tokens=80.0, repredictions=((60, 300.0), (100, 270.0), (230, 261.0))
    )
    made = workload_of(of_rows([first, *rows[1:]]), 50).predictions
    assert made.total_tokens[: made.start[1]].tolist() == [80, 80, 270, 270, 270, 261]
    assert made.gittins_rank[: made.start[1]].tolist() == [80, 30, 170, 120, 70, 11]
    assert np.diff(made.start)[1:].tolist() == [1] * 199


def test_the_same_traffic_gives_the_same_answer() -> None:
    trace = of_rows(single_server(2, 300))
    assert gain(trace, draws=5) == gain(trace, draws=5)
    assert gain(trace, draws=5) != gain(trace, draws=5, seed=1)


def test_a_journal_is_looked_back_at(tmp_path) -> None:
    rows, path = single_server(3, 400), tmp_path / "j.jsonl"

    async def write(some, clock_s: float) -> None:
        async with Journal(path, lambda: clock_s, epoch=lambda: 1e9 + clock_s) as journal:
            for row in some:
                journal.append(row)

    asyncio.run(write(rows[:250], 0.0))
    asyncio.run(write(rows[250:], 0.0))
    found = report(path, draws=5)
    direct = gain(of_rows(rows), draws=5)
    assert found.requests == 400
    assert found.fcfs_jct_s == pytest.approx(direct.fcfs_jct_s, rel=0.01)
    assert json.loads(json.dumps(as_json(found)))["decision"] == found.decision
    text = text_report(found)
    assert text.startswith(f"Verdict: {found.decision}")
    assert "lengths known" in text


def journal_of(path, runs, *, max_bytes: int = 1 << 30) -> None:
    """Runs of (rows, seconds since 1970 at which their clock stood at 0), each row written at its end."""

    async def write(some, unix_s: float) -> None:
        clock = {"epoch": lambda: unix_s, "max_bytes": max_bytes, "num_old": 16}
        async with Journal(path, lambda: 0.0, **clock) as journal:
            for row in sorted(some, key=lambda row: row.finished_s):
                journal.append(row)
                await journal.flush()

    for some, unix_s in runs:
        asyncio.run(write(some, unix_s))


def early_but_long(rows, start: int):
    """The row at ``start`` lasts longer than those behind it: it comes first and is written late."""
    last_s = rows[start + 20].finished_s + 1.0
    return [replace(row, finished_s=last_s) if i == start else row for i, row in enumerate(rows)]


@pytest.mark.parametrize("max_bytes", [1 << 30, 16_000])
def test_a_pause_of_the_gateway_is_no_pause_of_the_traffic(tmp_path, max_bytes: int) -> None:
    """However requests end, and in however many files they stand."""
    rows, path = early_but_long(early_but_long(single_server(3, 400), 150), 250), tmp_path / "j.jsonl"
    day_s = 86400.0
    journal_of(
        path,
        [(rows[:150], 1e9), (rows[150:250], 1e9 + day_s), ([], 1e9 + 1.5 * day_s), (rows[250:], 1e9 + 3 * day_s)],
        max_bytes=max_bytes,
    )
    assert (len(list(tmp_path.iterdir())) > 5) is (max_bytes == 16_000)
    reported, seen = of_journal(path), of_rows(rows)
    gaps, usual_s = np.diff(reported.arrival_s), np.median(np.diff(seen.arrival_s))
    assert gaps[[149, 249]] == pytest.approx([usual_s] * 2, rel=0.01)
    others = np.delete(np.arange(399), [149, 249])
    assert gaps[others] == pytest.approx(np.diff(seen.arrival_s)[others], abs=1e-4)
    assert reported.jct_s == pytest.approx(seen.jct_s, abs=1e-4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"finished_s": math.inf}, {"finished_s": 1e308},
        {"finished_s": 0.0}, {"arrival_s": 1e308}, {"dispatched_s": -5.0}, {"first_token_s": 1e9},
        dict.fromkeys(("arrival_s", "dispatched_s", "first_token_s", "finished_s"), 1e300),
        {"queued_for_s": math.inf}, {"queued_for_s": -1.0}, {"output_tokens": 10**12}, {"prompt_tokens": 10**12},
    ],
)  # fmt: skip
def test_rows_that_cannot_be_are_not_looked_at(wrong) -> None:
    rows = single_server(3, 300)
    assert len(of_rows([replace(rows[7], **wrong), *rows[:7], *rows[8:]])) == 299


def test_runs_without_served_requests_close_no_pause_twice(tmp_path) -> None:
    rows, path = single_server(3, 300), tmp_path / "j.jsonl"
    failed = [replace(rows[150], output_tokens=0, outcome="failed")]
    journal_of(path, [(rows[:150], 1e9), (failed, 2e9), (failed, 3e9), (rows[150:], 4e9)])
    reported = of_journal(path)
    assert len(reported) == 300
    assert np.all(np.diff(reported.arrival_s) >= 0)


@pytest.mark.slow
def test_a_running_gateway_looks_back_in_another_process() -> None:
    record = RecentRows()
    for row in single_server(3, 400):
        record.append(row)

    async def go() -> dict:
        async with Monitor(record, interval_s=0.1) as watch:
            while watch.estimate is None:  # noqa: ASYNC110 - it sends no event
                await asyncio.sleep(0.05)
        assert len(asyncio.all_tasks()) == 1
        return watch.estimate

    found, direct = asyncio.run(go()), as_json(gain(of_rows(record.rows)))
    assert (found["decision"], found["requests"]) == (direct["decision"], direct["requests"])
    assert [one["mean"]["low"] for one in found["orders"]] == pytest.approx(
        [one["mean"]["low"] for one in direct["orders"]], abs=1e-4
    )


@pytest.mark.parametrize(
    ("message", "report"),
    [("echo Traceback >&2; echo MemoryError: no room >&2", "MemoryError: no room"), ("true", "exit status 3")],
)
def test_a_failed_analysis_is_reported_in_one_line(message: str, report: str, tmp_path, monkeypatch, caplog) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\ncat >/dev/null\n{message}\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    record = RecentRows()
    for row in single_server(3, 250):
        record.append(row)

    async def go() -> None:
        async with Monitor(record, interval_s=60.0) as watch:
            while not caplog.messages:  # noqa: ASYNC110 - it sends no event
                await asyncio.sleep(0.01)
            assert watch.estimate is None

    asyncio.run(go())
    assert caplog.messages == [f"estimating the gain on the traffic failed: {report}"]
