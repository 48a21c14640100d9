from __future__ import annotations

import dataclasses
import io
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from rich.console import Console

from lengthwise.metrics import combine, summarize
from lengthwise.report import Result, table
from lengthwise.report.formatting import percent, rounded, seconds
from lengthwise.report.summary_table import bounded_texts, rows
from lengthwise.schema.errors import InputError
from lengthwise.schema.estimate import Estimate


def printed(results, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(table(results))
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 100])
def test_variants_stand_side_by_side_and_lines_fit(results, width) -> None:
    text = printed(results, width)
    assert "roomy <b>&</b>" in text
    assert "narrow" in text
    assert all(len(line) <= width for line in text.splitlines())
    p99 = results[0].summary.ttft_s.p99
    value, half = rounded(p99.value, p99.half_width)
    assert f"{value} ± {half}" in text
    assert "95 % intervals over 3 seeds" in text
    assert "ound by compute" in text or "ound by memory bandwidth" in " ".join(text.split())
    assert "timed out" in text


def test_names_are_not_markup(results) -> None:
    odd = [dataclasses.replace(results[0], name="[red]a[/red]"), results[1]]
    assert "[red]a[/red]" in printed(odd, 100)


def test_the_leader_is_determined_by_pairs_only_where_seeds_are_common(results) -> None:
    by_key = {row.metric.key: row for row in rows(results)}
    assert [c.leads for c in by_key["jct_s.p50"].cells] == [True, False]
    assert not any(c.leads for c in by_key["hardware.mfu"].cells)
    twins = [results[0], dataclasses.replace(results[0], name="twin")]
    assert not any(c.leads for row in rows(twins) for c in row.cells)
    alone = [dataclasses.replace(r, summaries=()) for r in results]
    sure = {r.metric.key for r in rows(results) if any(c.leads for c in r.cells)}
    unpaired = {r.metric.key for r in rows(alone) if any(c.leads for c in r.cells)}
    assert unpaired < sure


def test_one_run_states_the_source_of_its_intervals(toy) -> None:
    records = toy.records(100)
    text = printed([Result("one", summarize(records), records, toy.deployment())], 80)
    assert "No intervals: too few requests; use --seeds." in text
    replayed = Result("one", summarize(records), records, toy.deployment(), '[workload]\ntrace = "log.csv"\n')
    constant = '[workload]\nprompt = 9\noutput = { kind = "fixed", tokens = 5 }\narrivals = "constant"\n'
    fixed = Result("one", summarize(records), records, toy.deployment(), constant)
    closed = Result(
        "one", fixed.summary, records, fixed.deployment, constant.replace('arrivals = "constant"', "concurrency = 1")
    )
    none = dataclasses.replace(fixed.summary, counts=dataclasses.replace(fixed.summary.counts, finished=0))
    rejected = Result("one", none, records, toy.deployment())
    for same in (replayed, fixed, closed, rejected):
        assert "No intervals: too few requests." in printed([same], 80), "seeds change nothing"
    assert "±" not in text
    assert "MFU" not in text


def test_names_must_be_unique_and_one_must_exist(results) -> None:
    with pytest.raises(InputError, match="used twice: narrow"):
        table([results[1], results[1]])
    with pytest.raises(InputError, match="empty"):
        table([])


@pytest.mark.parametrize(
    ("value", "half", "text"),
    [
        (1.2345, 0.0123, ("1.234", "0.012")),
        (1234.5, 12.3, ("1,234", "12")),
        (10.0, 11.0, ("10", "11")),
        (0.11351, 0.000052, ("0.11351", "0.00005")),
        (12.345, math.nan, ("12.3", "")),
        (0.0, 0.0, ("0", "0")),
        (math.nan, 1.0, ("\N{EN DASH}", "")),
    ],
)
def test_values_are_rounded_to_their_half_width(value, half, text) -> None:
    assert rounded(value, half) == text


def test_a_half_width_of_rounding_errors_is_none() -> None:
    assert rounded(7.845859818, 1e-15) == ("7.85", "0")
    assert rounded(0.0, 0.0)[1] == "0"


@given(st.floats(1e-6, 1e9), st.floats(1e-9, 1e9))
def test_rounding_keeps_the_value_within_its_interval_and_never_hides_it(value, half) -> None:
    assume(half > 1e-12 * value)  # less is the rounding error of equal values
    shown, width = (float(x.replace(",", "")) for x in rounded(value, half))
    assert abs(shown - value) <= max(half, 1e-9)
    assert width > 0 or half < 1e-9


def test_times_and_shares_read_well() -> None:
    assert [seconds(s) for s in (0.0123, 4.5678, math.nan)] == ["12.3 ms", "4.57 s", "\N{EN DASH}"]
    assert [percent(s) for s in (0.374, 0.0042, 0.0, math.nan)] == ["37 %", "0.4 %", "0 %", "\N{EN DASH}"]


def test_rows_without_a_value_are_left_out(results) -> None:
    bare = [dataclasses.replace(r, summary=dataclasses.replace(r.summary, goodput=None)) for r in results]
    keys = {row.metric.key for row in rows(bare)}
    assert "rates.slo" not in keys
    assert {"ttft_s.p99", "cost.output", "rates.requests"} <= keys
    assert all(isinstance(c.estimate, Estimate) for row in rows(bare) for c in row.cells)


def test_a_long_run_states_that_its_intervals_are_batch_means(toy) -> None:
    records = toy.records(500)
    assert "(batch means)" in printed([Result("one", summarize(records), records, toy.deployment())], 80)


def test_two_seeds_are_few(results) -> None:
    two = [dataclasses.replace(r, summary=combine(r.summaries[:2])) for r in results]
    assert "2 seeds, few seeds: wide intervals" in printed(two, 120)
    assert "few seeds" not in printed(results, 120)


@pytest.mark.parametrize(
    ("value", "half", "top", "text"),
    [
        (97.5, 6.1, 100.0, ("97.5", "+2.5 \N{MINUS SIGN}6.1")),
        (3.0, 5.5, math.inf, ("3.0", "+5.5 \N{MINUS SIGN}3.0")),
        (50.0, 60.0, 100.0, ("50", "+50 \N{MINUS SIGN}50")),
        (50.0, 5.0, 100.0, ("50.0", "\N{PLUS-MINUS SIGN} 5.0")),
        (100.0, 0.0, 100.0, ("100", "\N{PLUS-MINUS SIGN} 0")),
        (50.0, math.nan, 100.0, ("50.0", "")),
    ],
)
def test_intervals_are_cut_to_what_can_be(value, half, top, text) -> None:
    assert bounded_texts(value, half, top) == text


def test_a_latency_has_one_unit_in_all_its_rows(results) -> None:
    slow = dataclasses.replace(results[0].summary.tbt_s, p99=Estimate(1.5), p50=Estimate(0.02))
    made = dataclasses.replace(results[0], summary=dataclasses.replace(results[0].summary, tbt_s=slow))
    assert {row.unit for row in rows([made]) if row.metric.key.startswith("tbt_s")} == {"s"}


def test_means_are_shown_for_littles_law(results) -> None:
    text = printed(results, 100)
    assert "TTFT mean" in text
    assert "JCT mean" in text


def test_the_lines_below_are_as_wide_as_the_console(results) -> None:
    one = [results[1]]
    wide = printed(one, 400).splitlines()
    below = [line.rstrip() for line in wide if line.rstrip() and line[0] not in "│├╰╭"]
    assert max(map(len, below)) > 150
    assert any(line.endswith(".") and "ound by" in line for line in below)


def test_unserved_requests_are_listed_first(results) -> None:
    counts = dataclasses.replace(
        results[1].summary.counts, finished=12, rejected=0, timed_out=588, unfinished=0, arrivals=600
    )
    bad = dataclasses.replace(results[1], summary=dataclasses.replace(results[1].summary, counts=counts))
    assert "narrow: 98 % of requests were not served (588 timed out)" in printed([bad], 200)
