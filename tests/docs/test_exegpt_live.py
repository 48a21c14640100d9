"""The page's section on a real engine says what its rows do: how far off, of what, and who is ahead."""

from __future__ import annotations

from functools import partial

import pytest
from documents import ROOT
from generated_pages import imported, table
from generated_pages import row as any_row

row = partial(any_row, better="lower")
TITLE = "On a real engine"


@pytest.fixture(scope="module")
def generator():
    with imported("generate_exegpt") as script:
        yield script


def spread(**means: float) -> dict:
    """Of two repeats, a tenth apart from the mean."""
    return {name: {"mean": mean, "range": [0.9 * mean, 1.1 * mean]} for name, mean in means.items()}


def schedule(steps: int = 10, stock_rps: float = 6.0) -> dict:
    expected = {"throughput_rps": 4.0, "latency_s": 3.0, "decode_batch": 8.0, "cycle_s": 2.0, "encode_s": 1.0}
    expected |= {"decode_s": 0.1, "controls": {"encode_batch": 8, "decode_steps": steps}}
    seen = {"throughput_rps": 5.0, "latency_s": 2.0, "decode_batch": 8.0, "cycle_s": 1.5, "encode_s": 1.0}
    return {
        "expected": expected,
        "seen": spread(**seen, decode_s=0.05, phases=20.0),
        "seen_of_gateway": spread(throughput_rps=4.5, latency_s=2.5, decode_batch=8.5, cycle_s=1.6, decode_steps=9.5),
        "stock_as_many_under_way": spread(throughput_rps=stock_rps, latency_s=2.5),
        "simulated": {"throughput_rps": 4.1, "latency_s": 3.0},
        "expected_over_seen": {"throughput": 0.8, "latency": 1.5, "decode_batch": 1.01},
    }


def parameter(name: str, value: float, prior: float) -> dict:
    return {"name": name, "label": f"the {name}", "value": value, "prior": prior}


def rows(*, steps: int = 10, stock_rps: float = 6.0, played_rps: float = 4.1, parameters: list | None = None) -> list:
    one = schedule(steps, stock_rps)
    one["simulated"]["throughput_rps"] = played_rps
    told = {
        "by_name": {"fast": one},
        "repeats": 2,
        "held_out_errors": {"rra-high-0": {"jct_p50": -0.03}, "rra-high-1": {"jct_p50": 0.24}},
        "calibration": parameters or [parameter("work", 1.0, 1.0)],
        "runs": {
            f"rra-{load}-{repeat}": {"iterations_s": 0.06, "iterations": 100, "engine_cpu_s": cpu_s}
            for load, repeat, cpu_s in (("half", 0, 33.0), ("half", 1, 30.0), ("high", 0, 30.0), ("high", 1, 40.0))
        },
    }
    return [
        row("exegpt.live.schedules", 1.0, details=told),
        row("exegpt.live.throughput_error", 0.2, target=0.05, details={"signed": {"fast": -0.2}}),
        row("exegpt.live.exact_phases", 1.0, target=1.0, better="higher", details={"phases": 40}),
        row("exegpt.live.over_stock", 5 / stock_rps, better="higher", details={"fast": 5 / stock_rps}),
    ]


def section(text: str) -> str:
    return text.partition(f"## {TITLE}\n")[2].partition("\n## ")[0]


def test_a_schedule_is_shown_as_expected_played_held_kept_and_without(generator):
    lines = table(generator.page(rows()), TITLE)
    assert [line[1] for line in lines] == [
        "expected",
        "event engine, same tables",
        "engine held to it",
        "kept by the gateway",
        "stock scheduler, 8 under way",
    ]
    assert lines[0] == ["fast: B_E = 8, N_D = 10", "expected", "4", "3", "8", "2", "1", "1", "10", "100"]
    assert lines[2][2:4] == ["5 (4.5 to 5.5)", "2 (1.8 to 2.2)"]
    assert lines[2][7:9] == ["0.5", "10"]
    assert lines[3][8] == "9.5 (8.55 to 10.5)"
    assert lines[4][2:5] == ["6 (5.4 to 6.6)", "2.5 (2.25 to 2.75)", "-"]


def test_what_is_off_is_told_by_part_with_its_sign(generator):
    text = section(generator.page(rows()))
    assert "All 40 phases are exactly as the schedule has them, 20 a repeat" in text
    assert "the throughput expected is off by -20 % (fast), the latency of the longest outputs by +50 % (fast)" in text
    assert "those of encoding are off by 0 % (fast), those of decoding by +100 % (fast)" in text
    assert "of decode iterations more than of encodings" in text
    assert "A phase ends when nobody is left" not in text
    assert "the median JCT is -3 % and +24 % off" in text
    assert "0.75 to 1.1 times the processor seconds" in text


def test_phases_that_end_before_n_d_are_said_to(generator):
    assert "here after 10 of 20 (fast) iterations" in section(generator.page(rows(steps=20)))


def test_a_log_that_was_fitted_is_named_and_moved_parameters_are(generator):
    assert "moved no parameter. On the stock" in section(generator.page(rows()))
    logged = [parameter("work", 1.2, 1.0), parameter("log_step", 0.1, 0.1)]
    text = section(generator.page(rows(parameters=logged)))
    assert "moved the work 1.2. It was given the engine's log of steps, which has 0.6 ms a step" in text
    assert "where decode iterations took 50 ms" in text


def test_who_is_ahead_is_said_as_it_is(generator):
    behind = section(generator.page(rows()))
    assert "**RRA is not ahead of the engine's own scheduler here**" in behind
    assert "it has 0.833 (fast) times the requests a second. On one stage" in behind
    assert "The gateway, which counts from outside, has 0.9 times" in behind
    ahead = section(generator.page(rows(stock_rps=4.0)))
    assert "**RRA is ahead with fast**" in ahead
    assert "On one stage" not in ahead


def test_tables_are_not_blamed_where_estimates_are_not_the_event_engines(generator):
    with pytest.raises(ValueError, match="estimates are the event engine's"):
        generator.page(rows(played_rps=5.0))


def test_its_figures_stand_with_their_aims_and_it_is_cited_from_the_head(generator):
    text = generator.page(rows())
    assert "| `exegpt.live.throughput_error` | " in text
    assert text.count("**missed** | tables of decode iterations") == 1
    assert "inside, a real vLLM on a CPU\n([below](#on-a-real-engine))" in text
    assert "../exegpt.md#on-a-real-engine" in (ROOT / "docs/decisions/0020-phases-before-engines.md").read_text("utf-8")
