"""Notes of a simulation: a nearly always busy front of the engine, a load of sessions that only rises and falls."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lengthwise import Workload, config, deploy, metrics
from lengthwise import simulate as run
from lengthwise.cli import main
from lengthwise.schema.workload import After
from lengthwise.usecases import explain, simulate, variants
from lengthwise.usecases.simulate import front_note, sent_rps
from lengthwise.usecases.variants import deployment

REQUESTED = """
[workload]
isl = 100
osl = 8
num_requests = 300
request_rate = {rate}
[deployment]
model = "llama-3-8b"
gpu = "H100"
host = {{ step_s = "300us", sequence_s = "9us", serial_s = "{queue}" }}
[engine]
max_model_len = 1024
[search]
seeds = 2
precision = 0.2
[search.limits]
ttft.p90 = "500ms"
"""


@pytest.mark.parametrize(
    ("rate", "queue", "report"),
    [(10, "1ms", ""), (10, "60ms", ""), (10, "90ms", "is busy 9"), (40, "50ms", "has work for 2")],
)
def test_a_simulation_reports_where_the_front_binds(rate, queue, report):
    (outcome,) = simulate.run(config.loads(REQUESTED.format(rate=rate, queue=queue) + "[run]\nmodel_draws = 0\n"))
    notes = [note for note in outcome.notes if "front" in note]
    assert len(notes) == bool(report)
    assert all(f"{queue.removesuffix('ms')} ms each" in note and report in note for note in notes)


def test_a_limit_that_no_request_meets_is_named_with_the_smallest_value():
    text = REQUESTED.format(rate=10, queue="1ms") + "[run]\nmodel_draws = 0\n[slo]\njct = '1min'\nttft = "
    (tight,), (loose,) = (simulate.run(config.loads(text + bound)) for bound in ("'1ms'", "'1s'"))
    (note,) = [note for note in tight.notes if note.startswith("No request meets ")]
    smallest_s = metrics.request_column(tight.records.requests, "ttft_s").min()
    assert note == f"No request meets slo.ttft = 1 ms (the smallest TTFT is {1e3 * smallest_s:.3g} ms)."
    assert tight.summary.goodput.share.value == 0
    assert not any(note.startswith("No request meets ") for note in loose.notes)


@pytest.mark.parametrize(
    ("preemption", "rate", "preempts", "warns"),
    [("by_rank", 1e3, True, True), ("by_rank", 1e-3, False, False), ("worth(factor=1e-9)", 1e3, True, False)],
)
def test_preemption_by_rank_is_warned_of_where_it_preempts(preemption, rate, preempts, warns):
    """With one slot, a shorter request that arrives later replaces a longer one."""
    settings = [
        "scheduler.policy=srtf",
        "predictor.kind=oracle",
        f"scheduler.preemption={preemption}",
        "engine.max_num_seqs=1",
        "workload.num_requests=50",
        'workload.osl={kind = "uniform", low = 2, high = 400}',
        "run.model_draws=0",
    ]
    (outcome,) = simulate.run(config.loads(REQUESTED.format(rate=rate, queue="0ms"), overrides=settings))
    count = int(outcome.records.requests.preemptions.sum())
    assert (count > 0) == preempts
    notes = [note for note in outcome.notes if "by_rank" in note]
    assert [note.startswith(f"{count:,} preemptions") for note in notes] == [True] * warns


def test_a_static_batch_is_no_rate_of_its_own():
    """All at once: what the front takes is held against the whole run."""
    requested = config.loads(REQUESTED.format(rate=10, queue="1ms"), overrides=["workload.request_rate=inf"])
    assert not any("front" in note for outcome in simulate.run(requested) for note in outcome.notes)


def test_requests_that_were_never_sent_do_not_hide_the_rate():
    """A session's later turns are not sent if the run ends before their parents."""
    after = After(np.array([0, 0, 0, 1]), np.array([0]))
    workload = Workload(np.array([0.0, 2.0, 2.0]), np.full(3, 10), np.full(3, 4000), after=after)
    records = run(workload, deploy("llama-3-8b", "H100"), time_limit_s=2.5)
    assert np.isnan(records.requests.arrival_s[2])
    assert sent_rps(records) == pytest.approx(1.0)


HIDDEN = "scheduler = { async_scheduling = true, hide_host = true }\n"


@pytest.mark.parametrize(("host", "warns"), [('"vllm"', True), ('{ step_s = "8ms", sequence_s = "20us" }', False)])
def test_a_step_that_hides_its_host_takes_the_longer_of_both_times(host, warns):
    text = HIDDEN + REQUESTED.format(rate=10, queue="1ms") + "[run]\nmodel_draws = 0\n"
    hidden = config.loads(text, overrides=[f"deployment.host={host}"])
    plain = config.loads(text, overrides=[f"deployment.host={host}", "scheduler.hide_host=false"])
    (outcome,) = simulate.run(hidden)
    assert any("counts overlap twice" in note for note in outcome.notes) == warns
    for one, other in zip(*(explain.explain(variants.build(one)[0]).steps for one in (hidden, plain)), strict=True):
        host_s = sum(operator.seconds for operator in one.operators if operator.name == "host")
        assert one.seconds == pytest.approx(max(host_s, other.seconds - host_s))
        assert sum(one.bound_shares.values()) == pytest.approx(1.0)


def test_capacity_reports_where_the_front_binds(tmp_path, capsys):
    path, reported = tmp_path / "small.toml", tmp_path / "out.json"
    path.write_text(REQUESTED.format(rate=1, queue="50ms"))
    assert main(["capacity", str(path), "--json", str(reported)]) == 0
    assert "limits the rate: it takes one request at a time, 50 ms each" in capsys.readouterr().out
    (one,) = json.loads(reported.read_text())["capacities"]
    assert one["requests_per_s"]["value"] < 20
    assert len(one["notes"]) == 1


def test_hosts_by_name_have_no_serial_front():
    for model in ("llama-3-8b", "mixtral-8x7b"):
        for host in ("vllm", "sglang", "trtllm"):
            text = REQUESTED.format(rate=1, queue="1ms")
            requested = config.loads(text, overrides=[f"deployment={{model='{model}',gpu='H200',host='{host}'}}"])
            assert not front_note(deployment(requested).cost, 1e5)


@pytest.mark.parametrize(
    ("limits", "share"),
    [
        ("max_tokens = 6", "60"),
        ("max_tokens = 8", "20"),
        ("max_tokens = 9", ""),
        ("", ""),
        ("max_tokens = 6\nignore_eos = true", ""),
    ],
)
def test_a_simulation_reports_outputs_that_end_at_the_limit(tmp_path, limits, share):
    rows = "".join(f"{i},9,{4 + i % 5}\n" for i in range(50))
    (tmp_path / "t.csv").write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
    deployed = '[deployment]\nmodel = "llama-3-8b"\ngpu = "H100"\n[run]\nmodel_draws = 0\n'
    (outcome,) = simulate.run(config.loads(f'[workload]\ntrace = "t.csv"\n{limits}\n{deployed}', folder=tmp_path))
    sentence = "% of outputs stop at max_tokens. With a larger max_tokens they could be longer."
    expected = [f"{share} {sentence}"] if share else []
    assert [note for note in outcome.notes if "max_tokens" in note] == expected


@pytest.mark.parametrize(("sessions", "notes"), [(150, 1), (2000, 0)])
def test_a_run_that_ends_while_sessions_fill_it_is_no_steady_load(sessions, notes, tmp_path):
    """Sessions of ten turns, 10 s apart, start at 1/s: the load rises for some 100 s, and falls as long."""
    file = tmp_path / "sessions.toml"
    file.write_text(
        """
[workload]
isl = 100
osl = 8
session_rate = 1
[workload.sessions]
turns = 1e6
max_turns = 10
think_time = "10s"
[deployment]
model = "llama-3-8b"
gpu = "H100"
"""
    )
    requested = config.load(file, [f"workload.num_requests={10 * sessions}", "run.model_draws=0"])
    (outcome,) = simulate.run(requested)
    assert len([note for note in outcome.notes if "not those of a steady load" in note]) == notes
    assert outcome.summary.rates.steady_share.value == pytest.approx(
        1 - 190 / (sessions + 90), abs=0.2 if notes else 0.05
    )


def test_rates_that_a_trace_fixes_have_no_sampling_interval(tmp_path):
    """Batches of a replay differ in their rates by the trace alone; latencies vary, and so do rates of drawn loads."""
    drawn = REQUESTED.format(rate=10, queue="1ms").replace("300\n", "600\n", 1) + "[run]\nmodel_draws = 0\n"
    (free,) = simulate.run(config.loads(drawn))
    arrivals = "".join(f"{0.1 * i + 2 * (i // 100)},100,8\n" for i in range(600))
    (tmp_path / "t.csv").write_text(f"arrived_at,num_prefill_tokens,num_decode_tokens\n{arrivals}")
    replayed = drawn[drawn.index("[deployment]") :] + f'[workload]\ntrace = "{tmp_path / "t.csv"}"\n'
    (fixed,) = simulate.run(config.loads(replayed))
    (cut,) = simulate.run(config.loads(replayed, overrides=["run.time_limit_s=60"]))
    for outcome, has_interval in ((free, True), (fixed, False), (cut, True)):
        rates = outcome.summary.rates
        each = (rates.requests_per_s, rates.prompt_tokens_per_s, rates.output_tokens_per_s)
        assert [rate.has_interval for rate in each] == [has_interval] * 3
        assert outcome.summary.jct_s.mean.has_interval
    assert fixed.summary.counts.finished == 600 > cut.summary.counts.finished
