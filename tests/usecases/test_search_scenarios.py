"""From [search] in a file to a question, and from a plan back to a scenario."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace

import numpy as np
import pytest

from lengthwise import report, search
from lengthwise.config import loads
from lengthwise.cost import ENGINE_HOSTS
from lengthwise.schema.deployment import KVOffloading
from lengthwise.schema.errors import InputError, ScenarioError, UnknownNameError
from lengthwise.schema.plan import Choice, Limit, Status, limit_text
from lengthwise.search.objectives import Task
from lengthwise.usecases import capacity, simulate, variants
from lengthwise.usecases import search as search_module

SMALL = """
name = "small"
[workload]
isl = { kind = "uniform", low = 20, high = 200 }
osl = 20
request_rate = 1
[deployment]
model = "llama-3-8b"
[engine]
max_model_len = 1024
[search]
max_gpus = 2
seeds = 3
precision = 0.1
top = 2
sensitivity = false
[search.limits]
ttft.p90 = "500ms"
[search.space]
gpu = ["H100", "L40S"]
batch = [4, 32]
"""


def requested(text: str = SMALL, *overrides: str):
    return search_module.questions(loads(text, overrides=overrides))


@pytest.fixture(scope="module")
def study():
    with search.threads(2) as workers:
        return search_module.plan(loads(SMALL), workers)


def test_axes_and_limits_have_one_spelling():
    text = SMALL.replace("batch =", "max_batch_size =").replace("ttft.p90", 'e2e.p99 = "9s"\nttft.p90')
    section = loads(text).search
    assert set(section.space) == {"deployment.gpu", "engine.max_num_seqs"}
    assert set(section.limits) == {"jct.p99", "ttft.p90"}
    assert requested(text)[0].bench.question.slo_limits.limits == (Limit("jct.p99", 9.0), Limit("ttft.p90", 0.5))


def test_what_the_base_leaves_out_comes_from_the_space():
    assert loads(SMALL).deployment.gpu == "H100"


def test_a_limit_on_waiting_is_added_where_none_is():
    question = requested(SMALL.replace('ttft.p90 = "500ms"', 'tbt.p99 = "50ms"'))[0].bench.question
    assert question.slo_limits.limits == (Limit("tbt.p99", 0.05), Limit("queueing_delay.p99", 5.0))


def test_within_slo_is_a_least_share():
    text = SMALL.replace('ttft.p90 = "500ms"', "within_slo = 0.9") + '[slo]\nttft = "1s"\n'
    slo_limits = requested(text)[0].bench.question.slo_limits
    assert slo_limits.limits == (Limit("within_slo", 0.9, at_least=True),)
    assert slo_limits.slo.ttft_s == 1.0


def test_a_rate_that_the_search_lacks_is_that_of_the_workload(tmp_path):
    text = SMALL.replace("[search]\n", '[search]\nobjective = "fewest_gpus"\n')
    assert requested(text.replace("request_rate = 1", "request_rate = 3"))[0].bench.question.rate_rps == 3.0
    assert requested(text, "search.rate=7")[0].bench.question.rate_rps == 7.0
    rows = "".join(f"{0.25 * n},100,20\n" for n in range(801))
    (tmp_path / "log.csv").write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
    lengths = 'isl = { kind = "uniform", low = 20, high = 200 }\nosl = 20\nrequest_rate = 1\n'
    replayed = text.replace(lengths, f'trace = "{tmp_path / "log.csv"}"\n')
    assert requested(replayed)[0].bench.question.rate_rps == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("change", "to", "words"),
    [
        ("request_rate = 1", "request_rate = 1e300", "at most 1,000,000"),
        ("top = 2", "top = 2\nrate = 1e300", "at most 1e"),
        ("batch = [4, 32]", "batches = [4]", "did you mean"),
        ("batch = [4, 32]", "batch = []", "at least one value"),
        ("batch = [4, 32]", "batch = [0]", "at least 1"),
        ("batch = [4, 32]", 'batch = ["many"]', "whole number"),
        ("batch = [4, 32]", "batch = [4]\nmax_num_seqs = [8]", "means the same"),
        ("ttft.p90", "tfft.p90", "Did you mean: ttft.p90"),
        ("ttft.p90", "ttft.q90", "must name a statistic"),
        ('"500ms"', '"500 parsecs"', "with a unit"),
        ('"500ms"', "0", "above 0"),
        ("ttft.p90", "within_slo", "below 1"),
        ("top = 2", "topp = 2", "did you mean search.top"),
    ],
)
def test_a_typo_is_reported_with_the_remedy(change, to, words):
    with pytest.raises(ScenarioError, match=words):
        loads(SMALL.replace(change, to).replace('within_slo = "500ms"', "within_slo = 1.5"))


def test_keys_of_the_cpu_memory_behind_the_cache_are_axes():
    text = SMALL.replace("[engine]", "[engine]\nenable_prefix_caching = true")
    axes = "engine.kv_offloading.size_gb = [0, 4]\nkv_offloading.gb_per_s = [12, 50]"
    (question,) = requested(text.replace("batch = [4, 32]", axes))
    assert question.scenario.engine.kv_offloading.size_gb == 0
    build, gpu = question.bench.build, {"deployment.gpu": "H100"}
    built = build(gpu | {"engine.kv_offloading.gb_per_s": 50, "engine.kv_offloading.size_gb": 4})
    assert built.limits.kv_offloading == KVOffloading(4, 50)
    built = build(
        gpu | {"engine.kv_offloading.size_gb": 8, "engine.kv_offloading": {"size_gb": 2, "load": "if_faster"}}
    )
    assert built.limits.kv_offloading == KVOffloading(8, 12, load="if_faster")
    with pytest.raises(ScenarioError, match=r"engine.kv_offloading.size_gb.*greater than or equal to 0|at least 0"):
        loads(text.replace("batch = [4, 32]", "kv_offloading.size_gb = [-1, 4]"))


def test_configurations_have_the_replicas_of_the_scenario_unless_the_space_has_some():
    for space, expected in (("", {2}), ("replicas = [1, 3]", {1, 3})):
        text = SMALL.replace("batch = [4, 32]", space)
        (question,) = requested(text, "deployment.replicas=2", "search.max_gpus=3")
        assert {one["deployment.replicas"] for one in question.space.candidates()} == expected
    own = "[[search.any_of]]\nreplicas = [1]\n[[search.any_of]]\nbatch = [4]\n"
    (question,) = requested(SMALL.replace("batch = [4, 32]", "") + own, "deployment.replicas=2")
    assert [one["deployment.replicas"] for one in question.space.candidates()] == [1, 1, 2, 2]
    assert "deployment.replicas" not in requested()[0].space.values()


@pytest.mark.parametrize(("objective", "gpus"), [("requests_per_dollar", 2), ("fewest_gpus", 1)])
def test_a_search_uses_the_replicas_of_the_scenario_or_reports_that_it_finds_them(objective, gpus):
    text = SMALL.replace('gpu = ["H100", "L40S"]\nbatch = [4, 32]', 'gpu = ["H100"]')
    found = loads(text, overrides=["deployment.replicas=2", f"search.objective={objective}", "run.model_draws=0"])
    with search.threads(1) as workers:
        (plan,) = search_module.plan(found, workers).plans
    best = plan.choices[0]
    assert (best.status, best.gpus) == (Status.RANKED, gpus)
    text = "the fewest that the rate needs; deployment.replicas = 2 is not used"
    assert plan.metadata["replicas"] == ("2 in each configuration" if gpus == 2 else text)


@pytest.mark.slow
def test_memory_behind_the_cache_counts_in_requests_per_dollar():
    free = SMALL.replace("[engine]", "[engine]\nenable_prefix_caching = true\nkv_offloading = { size_gb = 0 }")
    free = free.replace('gpu = ["H100", "L40S"]\nbatch = [4, 32]', 'gpu = ["L40S"]\nkv_offloading.size_gb = [0, 100]')
    priced = free.replace("{ size_gb = 0 }", "{ size_gb = 0, usd_per_gb_hour = 0.01 }")
    with search.threads(1) as workers:
        studies = [search_module.plan(loads(each, overrides=["run.model_draws=0"]), workers) for each in (free, priced)]
    plans, size = [study.plans[0] for study in studies], "engine.kv_offloading.size_gb"
    prices = [{choice.settings[size]: choice.price_per_hour_usd for choice in plan.choices} for plan in plans]
    assert prices[0][100] == pytest.approx(prices[0][0])
    assert prices[1][100] == pytest.approx(prices[1][0] + 1.0)
    # Its requests share no prefixes, so that memory finds nothing, and its price decides.
    assert plans[1].best.settings[size] == 0
    assert [any("usd_per_gb_hour" in note for note in plan.notes) for plan in plans] == [True, False]


def test_an_unknown_name_in_the_space_ends_the_search():
    with pytest.raises(UnknownNameError, match="H1000"), search.threads(1) as workers:
        search_module.plan(loads(SMALL.replace('"L40S"', '"H1000"')), workers)


def test_a_closed_loop_has_no_rate_to_search():
    with pytest.raises(InputError, match="closed loop"):
        requested(SMALL.replace("request_rate = 1", "concurrency = 4"))


def test_a_search_without_a_space_names_what_to_write():
    with pytest.raises(InputError, match=r"\[search.space\]"):
        requested(SMALL[: SMALL.index("[search]")].replace('"llama-3-8b"', '"llama-3-8b"\ngpu = "H100"'))


def test_the_bench_travels_to_another_process():
    bench = requested()[0].bench
    present = pickle.loads(pickle.dumps(bench))
    settings = {"deployment.gpu": "H100", "engine.max_num_seqs": 4}
    task = Task("bound", Choice("one", "", settings, 0, 0.0, Status.PRUNED))
    assert present(task) == bench(task)


@pytest.mark.slow
def test_the_search_finds_what_the_exhaustive_one_finds(study):
    with search.threads(2) as workers:
        complete = search_module.plan(loads(SMALL, overrides=["search.strategy=exhaustive"]), workers)
    assert study.plans[0].best.settings == complete.plans[0].best.settings
    assert {c.status for c in complete.plans[0].choices} <= {Status.RANKED, Status.SCOUTED}


def test_a_choice_becomes_a_scenario_that_repeats_its_claim(study):
    best = study.plans[0].best
    again = search_module.scenario_of_choice(requested()[0], best)
    assert again.search is None
    assert again.workload.request_rate == best.at.rate_rps
    assert loads(again.to_toml()).deployment == again.deployment
    again = again.with_run(seeds=3)
    longer = again.model_copy(update={"workload": again.workload.model_copy(update={"num_requests": 3000})})
    reported = simulate.run(longer.with_run(warmup_s=600 / best.at.rate_rps))[0].summary.ttft_s.p90
    claimed = best.at.values["ttft.p90"]
    assert reported.value == pytest.approx(claimed.value, rel=0.3)
    assert reported.value < 0.5 * 1.2


CHATS = """
name = "chats"
[workload]
isl = { kind = "uniform", low = 20, high = 100 }
osl = 20
session_rate = 1
[workload.groups]
count = 2
system_prompt = 320
[workload.sessions]
turns = 3
max_turns = 5
think_time = { median = "2s", sigma = 0.5 }
[deployment]
model = "llama-3-8b"
gpu = "L40S"
[engine]
max_model_len = 2048
enable_prefix_caching = true
[run]
model_draws = 0
[search]
seeds = 3
precision = 0.1
sensitivity = false
[search.limits]
ttft.p90 = "300ms"
[search.space]
batch = [8]
"""


def deployed(text, folder, monkeypatch):
    """Return the choice, the written scenario, its outcome and the trace of the load test."""
    monkeypatch.setattr(search_module, "CLAIM_S", 60.0)
    with search.threads(2) as workers:
        found = search_module.plan(loads(text), workers)
    (place,) = search_module.write_launches(loads(text), found, folder)
    scenario = loads((place / "scenario.toml").read_text())
    trace = [json.loads(line) for line in (place / "trace.jsonl").read_text().splitlines()]
    outcome, readme = simulate.run(scenario)[0], (place / "README.md").read_text()
    assert f"by `lengthwise simulate scenario.toml` (seeds {scenario.run.seed} to" in readme
    for limit in found.plans[0].limits:  # a run of the scenario gives the figures of the README
        if limit.metric == "ttft.p90":
            assert report.metric_text(limit.metric, outcome.summary.ttft_s.p90.value) in readme
    assert f"Simulated from an idle server with the same {len(trace):,} requests, this test gives" in readme
    return found.plans[0].best, scenario, outcome, trace


def test_the_scenario_of_deployed_sessions_repeats_the_claim(tmp_path, monkeypatch):
    best, scenario, outcome, trace = deployed(CHATS, tmp_path, monkeypatch)
    assert "scenario.toml reads" not in next(tmp_path.glob("*/README.md")).read_text()
    assert scenario.workload.sessions.turns == 3
    assert scenario.workload.groups.count == 2
    assert scenario.engine.enable_prefix_caching
    assert outcome.summary.prefix_cache.hit_rate.value > 0.5
    for stat in ("mean", "p90"):
        claimed = best.at.values[f"ttft.{stat}"]
        assert getattr(outcome.summary.ttft_s, stat).value == pytest.approx(claimed.value, rel=0.15)
    sent = outcome.summary.rates.requests_per_s.value
    assert sent == pytest.approx(best.at.values["requests_per_s"].value, rel=0.15)

    workload = outcome.variant.workload(scenario.run.seed)
    timestamps = [row["timestamp"] / 1e3 for row in trace]
    assert timestamps == sorted(timestamps)
    assert timestamps[-1] > workload.arrival_s[len(trace) - 1]  # later turns are sent after those before them
    shared = [len(set(row["hash_ids"]) & seen) for seen, row in zip(chunks_before(trace), trace, strict=True)]
    assert sum(shared) > 0.5 * sum(len(row["hash_ids"]) for row in trace)


def chunks_before(trace):
    seen = set()
    for row in trace:
        yield set(seen)
        seen |= set(row["hash_ids"])


@pytest.mark.parametrize("waits", [False, True])
def test_a_deployed_trace_of_shared_prefixes_stays_a_replay_at_the_claimed_rate(waits, tmp_path, monkeypatch):
    rng = np.random.default_rng(1)
    at_ms = np.sort(rng.integers(0, 400_000, 1200))
    rows = []
    for i, at in enumerate(at_ms.tolist()):
        row = {"timestamp": at, "input_length": 600, "output_length": 20, "hash_ids": [i % 5]}
        if waits and i % 4 == 3:
            row |= {"timestamp": rows[-1]["timestamp"], "wait_for": [str(i - 1)], "delay": 500}
        rows.append(row | ({"request_id": str(i)} if waits else {}))
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    drawn = CHATS[CHATS.index("isl") : CHATS.index("[deployment]")]
    text = CHATS.replace(drawn, f'trace = "{tmp_path / "trace.jsonl"}"\n')
    best, scenario, outcome, _ = deployed(text, tmp_path / "launch", monkeypatch)
    (readme,) = (tmp_path / "launch").glob("*/README.md")
    assert f"scenario.toml reads `{tmp_path / 'trace.jsonl'}`: this folder has no copy." in readme.read_text()
    replayed = outcome.variant.workload(0)
    assert scenario.workload.is_replay
    assert replayed.prefixes is not None
    assert (replayed.after is not None) == waits
    rate_rps = (len(replayed) - 1) / replayed.arrival_s[-1]
    assert rate_rps == pytest.approx(best.at.rate_rps, rel=1e-3)
    claimed = best.at.values["ttft.mean"].value
    assert outcome.summary.ttft_s.mean.value == pytest.approx(claimed, rel=0.3)


ENGINES = """
[workload]
isl = 300
osl = 30
request_rate = 1
max_tokens = 60
[deployment]
model = "llama-3-8b"
gpu = "L40S"
[engine]
max_model_len = 1024
[search.space]
"""


@pytest.mark.parametrize(
    ("space", "sizes"),
    [
        (
            'engine = ["vllm", "sglang"]',
            r"32,000 tokens with block_size 16 \(vllm\) and 2,000 .* block_size 1 \(sglang\)",
        ),
        ("block_size = [16, 32]", "32,000 tokens with block_size 16 and 64,000 tokens with block_size 32"),
    ],
)
def test_a_number_of_blocks_is_of_blocks_of_one_size(space, sizes):
    text = ENGINES + space
    with pytest.raises(InputError, match=f"must be of blocks of one size in a search; 2,000 blocks are {sizes}"):
        search_module.questions(loads(text, overrides=["deployment.num_blocks=2000"]))
    assert len(search_module.questions(loads(text))) == 1
    tables = "[[search.any_of]]\nengine = {}\nnum_blocks = {}\n"
    own = ENGINES + tables.format('"vllm"', 2000) + tables.format('"sglang"', 32_000)
    (requested,) = search_module.questions(loads(own))
    made = [requested.bench.build(settings) for settings in requested.space.candidates()]
    assert [one.kv.num_blocks * one.kv.block_size for one in made] == [32_000, 32_000]


def test_a_claim_has_the_cost_models_intervals_of_its_latencies_and_of_its_gpus(tmp_path):
    text = SMALL.replace("[search]\n", '[search]\nobjective = "fewest_gpus"\nrate = 30\n')
    scenario = loads(
        text.replace('gpu = ["H100", "L40S"]\nbatch = [4, 32]', 'gpu = ["L40S"]\nbatch = [4]'),
        overrides=["search.max_gpus=9"],
    )
    with search.threads(2) as workers:
        found = search_module.plan(scenario, workers)
    (place,) = search_module.write_launches(scenario, found, tmp_path)
    summary = simulate.run(loads((place / "scenario.toml").read_text()))[0].summary
    size, ttft = found.plans[0].best.objective, summary.ttft_s.p90
    assert size.has_model_interval
    ends = [report.metric_text("ttft.p90", end) for end in (ttft.model_low, ttft.model_high)]
    claim = (place / "README.md").read_text()
    assert re.search(r"\n- TTFT p90 \d[^,]*, limit 500 ms, ", claim)
    assert f", limit 500 ms, {ends[0]} to {ends[1]} by the cost model's error" in claim
    assert "No kernels were measured on L40S" in claim
    assert ("This simulation breaks TTFT p90 ≤ 500 ms" in claim) == (ttft.value > 0.5)
    ends = f"{size.model_low:g} to {size.model_high:g} by the cost model's error"
    assert re.search(rf" GPUs( \(± [\d.]+\))?, {ends}", claim)


def test_a_claim_whose_simulation_breaks_a_limit_says_so(study):
    plan = study.plans[0]
    claimed = search_module.scenario_of_choice(requested()[0], plan.best)
    summary = simulate.run(claimed)[0].summary
    for bound_s in (2 * summary.ttft_s.p90.value, summary.ttft_s.p90.value / 2):
        limit = Limit("ttft.p90", bound_s)
        text = search_module.claim_text(replace(plan, limits=(limit,)), plan.best, summary, claimed)
        breaks = f"**This simulation breaks {limit_text(limit)}"
        assert (breaks in text) == (bound_s < summary.ttft_s.p90.value)


def test_a_load_test_that_is_expected_to_break_its_limit_says_so():
    scenario = loads(
        ENGINES[: ENGINES.index("[search.space]")], overrides=["workload.num_requests=1000", "workload.request_rate=8"]
    )
    (variant,) = variants.build(scenario)
    workload, d = variant.workload(0), variant.deployment
    sent = simulate.engine.simulate(workload, d, max_log_steps=0)
    ttft = simulate.metrics.summarize(sent, d).ttft_s.p90
    assert ttft.half_width > 0
    for bound_s, words in (
        (ttft.value + ttft.half_width, ""),
        (ttft.value - ttft.half_width / 2, " within its interval: the claim"),
        (ttft.value - 2 * ttft.half_width, " by more than its interval: the claim"),
    ):
        limit = Limit("ttft.p90", bound_s)
        text = search_module.expected_text([limit], workload, d, 0, 0.0)
        assert words in text
        assert (f"This test breaks {limit_text(limit)}" in text) == bool(words)


@pytest.mark.slow  # compiles the rules of engines
@pytest.mark.parametrize("engine", ["sglang", "trtllm"])
def test_a_load_test_is_expected_to_give_what_its_client_sends(engine):
    """Its client sends the length of each output as max_tokens, by which these engines admit."""
    text = ENGINES.replace("max_model_len = 1024", f'name = "{engine}"\nmax_model_len = 4096')
    size = loads(text + "batch = [8]\n").engine.block_size
    settings = [f"deployment.num_blocks={8192 // size}", "workload.num_requests=200", "workload.request_rate=20"]
    texts, measured = set(), set()
    for limit in (30, 3000):
        scenario = loads(text[: text.index("[search.space]")], overrides=[*settings, f"workload.max_tokens={limit}"])
        (variant,) = variants.build(scenario)
        workload = variant.workload(0)
        texts.add(search_module.expected_text([Limit("ttft.p99", 1.0)], workload, variant.deployment, 0, 0.0))
        records = simulate.engine.simulate(workload, variant.deployment, max_log_steps=0)
        measured.add(round(simulate.metrics.summarize(records, variant.deployment).ttft_s.p99.value, 1))
    assert len(texts) == 1
    assert len(measured) == 2


@pytest.mark.slow
def test_variants_are_questions_and_their_winners_are_swapped():
    text = SMALL + '[[variants]]\nname = "short"\n[[variants]]\nname = "long"\nworkload.osl = 200\n'
    with search.threads(2) as workers:
        found = search_module.plan(loads(text), workers)
    assert [plan.name for plan in found.plans] == ["short", "long"]
    ratios = {(swap.optimum_of, swap.used_for): swap.ratio for swap in found.swaps}
    assert ratios["short", "short"] == ratios["long", "long"] == 1.0
    assert all(np.isnan(ratio) or ratio > 0.9 for ratio in ratios.values())


@pytest.mark.slow
def test_a_replayed_trace_is_searched_by_its_parts(tmp_path):
    rng = np.random.default_rng(0)
    rows = zip(np.cumsum(rng.exponential(1.0, 2000)), rng.integers(20, 200, 2000), strict=True)
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + "\n".join(f"{t},{p},20" for t, p in rows))
    text = SMALL.replace(
        'isl = { kind = "uniform", low = 20, high = 200 }\nosl = 20\nrequest_rate = 1', f'trace = "{trace}"'
    ).replace("batch = [4, 32]", "batch = [1, 2]")
    load = requested(text)[0].bench.load
    assert (load.seeds, load.max_requests) == (5, 400)
    assert load.at(0, 400, 2.0).arrival_s[-1] == pytest.approx(399 / 2.0)
    with search.threads(2) as workers:
        best = search_module.plan(loads(text), workers).plans[0].best
    assert best.capacity_rps.has_interval
    again = search_module.scenario_of_choice(requested(text)[0], best)
    arrival_s = variants.build(again)[0].workload(0).arrival_s
    assert len(arrival_s) == 2000  # its own arrivals, at the rate of the choice
    assert (len(arrival_s) - 1) / (arrival_s[-1] - arrival_s[0]) == pytest.approx(best.at.rate_rps)


def test_capacity_has_the_default_limit():
    text = SMALL.replace('[search.limits]\nttft.p90 = "500ms"\n', "")
    (found,) = capacity.capacities(loads(text))
    assert found.limits == (Limit("queueing_delay.p99", 5.0),)
    assert 0 < found.capacity.rate_rps.value < found.capacity.ceiling.rate_rps
    assert found.at.satisfied


def test_stages_share_the_batch():
    text = SMALL.replace("max_model_len = 1024", 'max_model_len = 1024\nmax_step_seqs = "per_stage"')
    one = loads(text, overrides=["deployment.pp=2", "engine.max_num_seqs=9"])
    assert variants.deployment(one).limits.max_step_seqs == 4


def test_a_search_carries_the_engines_host_to_its_questions_and_back():
    text = SMALL.replace("[engine]", 'host = "vllm"\n[engine]')
    (question,) = requested(text)
    complete = search_module.questions(loads(text))[0].bench.build({"deployment.gpu": "H100"})
    assert complete.cost.host_s[0] == ENGINE_HOSTS["vllm"].step_s
    assert 'host = "vllm"' in question.scenario.to_toml()
    axis = SMALL.replace("batch = [4, 32]", 'host = ["default", "sglang", { step_s = 0.002 }]')
    (question,) = requested(axis)
    reported = [question.bench.build({"deployment.gpu": "H100", "deployment.host": h}).cost.host_s[0]
            for h in loads(axis).search.space["deployment.host"]]  # fmt: skip
    assert reported == [126e-6, ENGINE_HOSTS["sglang"].step_s, 0.002]


def test_a_misspelled_host_of_a_space_is_reported():
    with pytest.raises(ScenarioError, match="must be one of default, vllm, sglang, trtllm"):
        loads(SMALL.replace("batch = [4, 32]", 'host = ["vllm", "vlm"]'))


@pytest.mark.slow  # compiles the rules of SGLang
def test_a_search_compares_the_schedulers_of_engines():
    text = SMALL.replace("osl = 20", "osl = 20\nmax_tokens = 60").replace('gpu = ["H100", "L40S"]\nbatch = [4, 32]', "")
    text = text.replace('model = "llama-3-8b"', 'model = "llama-3-8b"\ngpu = "H100"')
    text += 'scheduler = ["vllm_v1", "sglang"]\n'
    with search.threads(1) as workers:
        (plan,) = search_module.plan(loads(text), workers).plans
    assert {c.settings["scheduler.policy"] for c in plan.choices} == {"vllm_v1", "sglang"}
    assert {c.status for c in plan.choices} <= {Status.RANKED, Status.SCOUTED}
    # What an engine's rules do not cover excludes a configuration; what the workload lacks, the question.
    with search.threads(1) as workers:
        (plan,) = search_module.plan(loads(text + "pp = [2]\n"), workers).plans
    left_out = [c for c in plan.choices if c.status is Status.REJECTED]
    assert [c.settings["scheduler.policy"] for c in left_out] == ["sglang"]
    assert "not modelled with pipeline parallelism" in left_out[0].exclusion.reason
    with pytest.raises(InputError, match="admits requests by their max_tokens"), search.threads(1) as workers:
        search_module.plan(loads(text.replace("max_tokens = 60", "")), workers)


def test_a_load_test_is_expected_in_order_of_arrival_as_its_client_sends_no_priority():
    start = ENGINES[: ENGINES.index("[search.space]")]
    texts = set()
    for rank in ("fcfs_preempted_first", "shortest_prompt"):
        overrides = ["workload.num_requests=300", "workload.request_rate=30", f"scheduler.rank={rank}"]
        (variant,) = variants.build(loads(start, overrides=overrides))
        workload = variant.workload(0)
        texts.add(search_module.expected_text([Limit("ttft.p99", 1.0)], workload, variant.deployment, 0, 0.0))
    assert len(texts) == 1


def test_configurations_that_cannot_be_built_are_listed_by_cause():
    text = SMALL.replace("batch = [4, 32]", "tp = [1, 3]\npp = [1, 99]").replace('"L40S"', '"A40"')
    with search.threads(1) as workers:
        (plan,) = search_module.plan(loads(text, overrides=["run.model_draws=0"]), workers).plans
    found = {group.example: group.count for group in plan.excluded_groups if group.name == "cannot be built"}
    assert sorted(found.values()) == [2, 4], found
    assert any("tp must divide" in example for example in found)
    assert any("pp) of llama-3-8b must be" in example for example in found)
