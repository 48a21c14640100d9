"""What the page says of calibrations' seconds and of counters is what the rows hold."""

from __future__ import annotations

import pytest
from generated_pages import imported, row, table


@pytest.fixture(scope="module")
def generator():
    with imported("generate_fidelity") as script:
        yield script


def test_every_case_that_was_timed_stands_with_what_it_had(generator):
    case = {"requests": 302, "runs": 4, "beside_them": "counters", "masks": "found", "simulations": 4100}
    details = {"cases": {"a": case | {"cpu_s": 70.0, "wall_s": 71.23}}, "machine": {"load_1m": 2.51, "cores": 2}}
    text = generator.page([row("calibrate_300_s", 70.0, unit="s", target=60.0, details=details)])
    assert table(text, "How long a calibration takes") == [
        ["a", "302 of 4 runs", "counters", "found", "4,100", "70", "71.2"]
    ]
    assert "load average 2.5 on 2 cores" in text
    assert "the slowest of these in seconds of processor time" in text
    by_clock = row("calibrate_300_s", 71.23, unit="s", target=60.0, details=details | {"counted": "wall_s"})
    assert "the slowest of these in seconds by the clock" in generator.page([by_clock])
    assert "older count" not in text


def test_a_time_of_another_count_is_called_so(generator):
    text = generator.page([row("calibrate_300_s", 5.59, unit="s", details={"wall": 5.59})])
    assert "An older count, of half of the 300 requests of one run" in text


def counters(**ranks: bool) -> dict:
    kind = {"error": 0.012, "low": 0.004, "high": 0.02, "width": 0.12, "satisfied": 12}
    differences = {
        pair.replace("_", " "): {"mean": -0.01, "low": -0.02, "high": 0.001, "ranks": of} for pair, of in ranks.items()
    }
    details = {
        "of_runs": 12,
        "planted": 0.002,
        "kinds": dict.fromkeys(("requests", "counters", "log"), kind),
        "differences": differences,
    }
    return row("fidelity.counters.host_step_error", 0.012, unit="relative", details=details)


def test_counters_stand_beside_requests_alone_and_a_log_and_rank_nothing_within_chance(generator):
    text = generator.page([counters(counters_less_requests=False)])
    assert table(text, "What a server's counters add") == [
        ["host step", fitted, "1.2 % [0.4 to 2 %]", "0.12", "12 of 12"]
        for fitted in ("requests alone", "and counters", "and a log of every step")
    ]
    assert "nothing here ranks one above another" in text


def test_a_difference_beyond_chance_is_named(generator):
    text = generator.page([counters(counters_less_requests=True, counters_less_log=False)])
    assert "larger than their 95 % intervals: host step, counters less requests -1 % [-2 to +0.1]." in text
    assert "ranks one above" not in text
