"""Gaps of service: of traffic whose gap is known, and below VTC's bound wherever the gateway's scheduler is fair."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.gateway.config import Order
from lengthwise.gateway.observe import Service, fairness, fairness_text, of_rows
from lengthwise.gateway.observe.replay import VirtualGateway
from lengthwise.gateway.telemetry import Row
from lengthwise.schema.workload import Workload


def rows_of(served, tenants, prompts, outputs):
    """Rows of (arrival, dispatch, first token, finish)."""
    columns = zip(served, tenants, prompts, outputs, strict=True)
    return [
        Row(at, "m", name, 0, *times[:1], prompt, 0, 50.0, "prior", 0.5, (), output, times[1] - times[0], *times[1:],
            times[3] - times[1], "w", 0, 0, 0, "finished")
        for at, (times, name, prompt, output) in enumerate(columns)
    ]  # fmt: skip


def test_a_known_gap_and_its_shares():
    """One slot: "a" runs twice, then "b" once; both wait from 0 to 2 s, "b" alone later."""
    served = [
        (0.0, 0.0, 0.5, 1.0),
        (0.0, 1.0, 1.5, 2.0),
        (0.0, 2.0, 2.5, 3.0),
        (0.0, 3.0, 3.5, 4.0),
        (0.0, 4.0, 4.5, 5.0),
    ]
    trace = of_rows(rows_of(served, "aabab", [10] * 5, [11] * 5))
    found = fairness(trace, Order())
    assert [(one.name, one.requests, one.service) for one in found.tenants] == [("a", 3, 96.0), ("b", 2, 64.0)]
    assert found.jain == pytest.approx(160**2 / (2 * (96**2 + 64**2)))
    # Both have waiting requests from 0 to 3 s. The difference is 10 just after 0 and 64 just before 2, then it falls.
    assert found.max_gap == pytest.approx(54.0)
    assert found.backlogged_s == pytest.approx(3.0)
    assert found.bound == 2 * 2 * 21.0
    assert "largest gap of service" in fairness_text(found)
    assert fairness(trace.take(np.arange(1)), Order()) is None
    assert fairness(of_rows(rows_of(served, "aaaaa", [10] * 5, [11] * 5)), Order()) is None


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_the_gateways_scheduler_is_within_vtcs_bound(data):
    """Any demands of two to four tenants at once, any lengths and mispredictions, one to three engines."""
    n, count = data.draw(st.integers(10, 60)), data.draw(st.integers(2, 4))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    tenants = rng.choice(count, n, p=rng.dirichlet(np.ones(count))).tolist()
    outputs, prompts = rng.integers(1, 200, n), rng.integers(1, 400, n)
    predicted = outputs * rng.lognormal(0, 0.7, n) if data.draw(st.booleans()) else outputs.astype(float)
    arrival_s = np.sort(rng.uniform(0, data.draw(st.sampled_from((0.0, 5.0))), n))
    service = Service(0.01, 0.001, 0.0001, 0.0, data.draw(st.integers(1, 8)), data.draw(st.integers(1, 3)), 0.5, 0.0)
    mode = data.draw(st.sampled_from(("fcfs", "srtf")))
    order = Order(mode=mode, fairness="vtc", max_wait_s=1e9)
    workload = Workload(arrival_s, prompts, outputs, np.maximum(predicted, 1.0))
    run = VirtualGateway(workload, service, order, tenants=tenants).run()
    times = np.stack([arrival_s, arrival_s + run.queued_for_s, arrival_s + run.ttft_s, arrival_s + run.jct_s], axis=1)
    rows = rows_of(times.tolist(), [f"t{one}" for one in tenants], prompts.tolist(), outputs.tolist())
    found = fairness(of_rows(rows), replace(order, mode="fcfs"))
    assert found is None or found.gap_over_bound <= 1.0


def test_the_report_of_a_journal_has_it(tmp_path, capsys):
    from lengthwise.cli import main
    from lengthwise.gateway.telemetry.journal import FORMAT, VERSION, as_dict

    served = [(0.1 * at, 0.1 * at + 0.05, 0.1 * at + 0.1, 0.1 * at + 0.5) for at in range(20)]
    rows = rows_of(served, "ab" * 10, [10] * 20, [11] * 20)
    journal = tmp_path / "day.jsonl"
    head = {"format": FORMAT, "version": VERSION, "clock_s": 0.0, "unix_s": 0.0}
    journal.write_text("".join(json.dumps(one) + "\n" for one in (head, *map(as_dict, rows))))
    main(["serve", "--report", str(journal), "--json", str(tmp_path / "out.json")])
    assert "Fairness between 2 tenants" in capsys.readouterr().out
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["fairness"]["jain"] == pytest.approx(1.0)
