"""From a scenario to workloads, schedulers and deployments."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lengthwise import config, policy
from lengthwise import workload as w
from lengthwise.cost import ENGINE_HOSTS, HostOverhead
from lengthwise.schema.deployment import Scheduler
from lengthwise.schema.errors import DoesNotFitError, InputError, PolicyError, TraceError, UnknownNameError
from lengthwise.usecases import explain, variants
from lengthwise.usecases.requests import workload_by_seed

DEPLOYMENT = '[deployment]\nmodel = "llama-3-8b"\ngpu = "H100"\n'
LOAD = "isl = 64\nosl = 16\nnum_requests = 40\nrequest_rate = 5"


def requested(workload=LOAD, rest="", folder="."):
    return config.loads(f"[workload]\n{workload}\n{DEPLOYMENT}{rest}", folder=folder)


def requests(workload, seed=0, folder="."):
    found = requested(workload, folder=folder)
    return workload_by_seed(found)(seed)


@pytest.fixture
def trace(tmp_path):
    complete = w.generate(30, w.Joint(w.Uniform(5, 500), w.Uniform(5, 500)), w.Poisson(2.0), seed=3)
    w.write(complete, tmp_path / "trace.csv", "vidur")
    return w.read(tmp_path / "trace.csv")


def same(a, b):
    return (
        np.array_equal(a.arrival_s, b.arrival_s)
        and np.array_equal(a.prompt_tokens, b.prompt_tokens)
        and np.array_equal(a.output_tokens, b.output_tokens)
    )


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("7", w.Fixed(7)),
        ('{ kind = "uniform", min = 2, max = 9 }', w.Uniform(2, 9)),
        ('{ kind = "zipf", low = 2, high = 90, theta = 1.1 }', w.Zipf(2, 90, 1.1)),
        ('{ kind = "lognormal", median = 90, sigma = 0.5 }', w.LogNormal(90, 0.5)),
        ('{ kind = "log-normal", median = 90, p90 = 300 }', w.LogNormal.from_median_p90(90, 300)),
        ('{ kind = "lognormal", mean = 90, sd = 30 }', w.LogNormal.from_mean_sd(90, 30)),
        ('{ kind = "normal", mean = 90, std = 30, max = 120 }', w.TruncatedNormal(90, 30, 1, 120)),
        ('{ kind = "skew_normal", mean = 90, sd = 30, skewness = 0.5 }', w.SkewNormal(90, 30, 0.5)),
        ('{ kind = "quantiles", levels = [0, 0.5, 1], tokens = [1, 50, 900] }', w.Quantiles([0, 0.5, 1], [1, 50, 900])),
        (
            '{ kind = "quantiles", mean = 100, median = 70, p90 = 200, high = 1000 }',
            w.Quantiles.from_mean_median_p90(100, 70, 200, high=1000),
        ),
        ('{ kind = "empirical", tokens = [3, 9], weights = [1, 3] }', w.Empirical([3, 9], [1, 3])),
    ],
)
def test_lengths_are_those_of_the_workload_room(text, lengths):
    got = requests(f"isl = {text}\nosl = 5\nnum_requests = 50\nrequest_rate = 1", seed=4)
    assert same(got, w.generate(50, w.Joint(lengths, w.Fixed(5)), w.Poisson(1.0), 4))


@pytest.mark.parametrize(
    ("text", "arrivals"),
    [
        ("request_rate = 2", w.Poisson(2.0)),
        ("request_rate = inf", w.AllAtOnce()),
        ('arrivals = "static"', w.AllAtOnce()),
        ('request_rate = 2\narrivals = "constant"', w.Constant(2.0)),
        ('request_rate = 2\narrivals = { kind = "gamma", cv = 3 }', w.Gamma(2.0, 3.0)),
        ('request_rate = 2\narrivals = { kind = "weibull", cv = 0.5 }', w.Weibull(2.0, 0.5)),
        ('request_rate = 2\narrivals = "elis"', w.elis_gamma(2.0)),
        (
            'arrivals = { kind = "rate_profile", times_s = [0, 9], rates_rps = [1, 5], linear = true }',
            w.RateProfile([0, 9], [1, 5], linear=True),
        ),
    ],
)
def test_arrivals_are_those_of_the_workload_room(text, arrivals):
    got = requests(f"isl = 9\nosl = 5\nnum_requests = 50\n{text}", seed=4)
    assert same(got, w.generate(50, w.Joint(w.Fixed(9), w.Fixed(5)), arrivals, 4))


def test_a_closed_loop_a_correlation_a_prediction_and_a_limit():
    uniform = '{ kind = "uniform", low = 1, high = 900 }'
    got = requests(
        f"isl = {uniform}\nosl = {uniform}\nnum_requests = 500\nconcurrency = 6\ncorrelation = 0.9\n"
        'predicted = "oracle"\nmax_prompt_tokens = 600\nmax_total_tokens = 1000'
    )
    assert got.concurrency == 6
    assert np.corrcoef(got.prompt_tokens, got.output_tokens)[0, 1] > 0.5
    assert np.array_equal(got.predicted_tokens, got.output_tokens)
    assert got.prompt_tokens.max() == 600
    assert (got.prompt_tokens + got.output_tokens).max() == 1000


def test_a_preset_has_arrivals_of_its_own_which_others_replace():
    own = w.preset("chat-1m")
    assert same(requests('preset = "chat-1m"\nnum_requests = 20', 2), own.generate(20, seed=2))
    faster = requests('preset = "chat-1m"\nnum_requests = 20\nrequest_rate = 9', 2)
    assert same(faster, own.generate(20, w.Poisson(9.0), 2))


def test_a_trace_alone_is_replayed_whatever_the_seed(tmp_path, trace):
    assert same(requests('trace = "trace.csv"', 5, tmp_path), trace)
    half = requests('trace = "trace.csv"\ntime_scale = 0.5\nnum_requests = 10', 5, tmp_path)
    assert np.allclose(half.arrival_s, trace.arrival_s[:10] * 0.5)
    assert np.array_equal(half.prompt_tokens, trace.prompt_tokens[:10])
    cut = requests('trace = "trace.csv"\nmax_output_tokens = 100', 5, tmp_path)
    assert np.array_equal(cut.output_tokens, np.minimum(trace.output_tokens, 100))


def test_a_replay_keeps_the_other_columns_of_the_trace(tmp_path, trace):
    known = w.generate(30, w.Samples.of(trace), w.Poisson(1.0), predicted="mean", priority=np.arange(30))
    w.write(known, tmp_path / "known.parquet")
    got = requests('trace = "known.parquet"\nnum_requests = 7', folder=tmp_path)
    assert np.array_equal(got.priority, np.arange(7))
    assert np.array_equal(got.predicted_tokens, known.predicted_tokens[:7])


def test_a_trace_with_a_rate_lends_its_lengths(tmp_path, trace):
    got = requests('trace = "trace.csv"\nrequest_rate = 3\nnum_requests = 400', 1, tmp_path)
    assert same(got, w.generate(400, w.Samples.of(trace), w.Poisson(3.0), 1))


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("300", w.Fixed(300)),
        ('{ kind = "uniform", min = 9, max = 400 }', w.Uniform(9, 400)),
        ('{ kind = "multiple", times = 1.5 }', 1.5),
        ('"none"', None),
        ("300\nignore_eos = true", w.Fixed(300)),
    ],
)
def test_clients_limit_their_outputs(text, limits):
    lengths = 'isl = 50\nosl = { kind = "uniform", low = 100, high = 600 }\nnum_requests = 50\nrequest_rate = 1'
    got = requests(f"{lengths}\nmax_tokens = {text}")
    model = w.ClientLimits(w.Joint(w.Fixed(50), w.Uniform(100, 600)), limits, ignore_eos="ignore_eos" in text)
    expected = w.generate(50, model, w.Poisson(1.0), 0)
    assert same(got, expected)
    for column in ("max_tokens", "ignore_eos"):
        assert (getattr(got, column) is None) == (getattr(expected, column) is None)
        assert np.array_equal(getattr(got, column), getattr(expected, column))
    assert (got.output_tokens != requests(lengths).output_tokens).any() == (limits not in (1.5, None))


def test_the_limits_of_a_trace_are_its_own_until_a_scenario_sets_others(tmp_path, trace):
    limited = replace(trace, max_tokens=trace.output_tokens + 100)
    w.write(limited, tmp_path / "limited.csv", "vidur")
    assert np.array_equal(requests('trace = "limited.csv"', folder=tmp_path).max_tokens, limited.max_tokens)
    lent = requests('trace = "limited.csv"\nrequest_rate = 3\nnum_requests = 90', folder=tmp_path)
    assert np.array_equal(lent.max_tokens, lent.output_tokens + 100)
    assert requests('trace = "limited.csv"\nmax_tokens = "none"', folder=tmp_path).max_tokens is None
    cut = requests('trace = "limited.csv"\nmax_tokens = 40', folder=tmp_path)
    assert np.array_equal(cut.output_tokens, np.minimum(trace.output_tokens, 40))
    exact = requests('trace = "limited.csv"\nignore_eos = true', folder=tmp_path)
    assert np.array_equal(exact.output_tokens, limited.max_tokens)


def test_paths_start_at_the_scenario_and_else_at_the_working_folder(tmp_path, trace, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    assert len(requests('trace = "trace.csv"', folder=tmp_path / "elsewhere")) == len(trace)


def test_a_bad_trace_is_known_before_anything_runs(tmp_path):
    (tmp_path / "bad.csv").write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,5,5\n1,nan,5\n")
    found = requested('trace = "bad.csv"', folder=tmp_path)
    with pytest.raises(TraceError, match=r"bad\.csv.*3"):
        variants.build(found)


def test_variants_share_the_requests_of_a_seed():
    a, b = variants.build(
        requested(rest='[[variants]]\nname = "a"\n[[variants]]\nname = "b"\nscheduler.policy = "orca"\n')
    )
    assert (a.name, b.name) == ("a", "b")
    assert a.workload(3) is b.workload(3)
    assert not same(a.workload(3), a.workload(4))


def test_variants_of_other_block_sizes_share_prompts_in_their_own_blocks():
    text = """
    [workload]
    isl = 100
    osl = 8
    num_requests = 50
    request_rate = 1
    [workload.groups]
    count = 2
    system_prompt = 100
    [deployment]
    model = "llama-3-8b"
    gpu = "H100"
    [[variants]]
    name = "16"
    [[variants]]
    name = "24"
    engine.block_size = 24
    """
    for made in variants.build(config.loads(text)):
        size, shared = made.deployment.limits.block_size, made.workload(0).prefixes.block_tokens
        assert max(size, shared) % min(size, shared) == 0


def test_schedulers_by_name_by_axis_and_by_object(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from lengthwise import policy\n"
        "from lengthwise.schema.deployment import Scheduler\n"
        "@policy.rank\ndef longest_prompt(prompt_tokens):\n    return -float(prompt_tokens)\n"
        'whole = Scheduler(batching="mixed", memory="reserve_max")\n'
        "number = 3\n"
    )

    def scheduler(lines):
        return variants.scheduler(requested(rest=f"[scheduler]\n{lines}", folder=tmp_path))

    assert scheduler("") == policy.scheduler("vllm_v1")
    assert scheduler('policy = "sarathi"') == policy.scheduler("sarathi")
    assert scheduler('rank = "sjf"\nrouter = "random"\npreemption_mode = "swap"') == Scheduler(
        rank="sjf", batching="unified", memory="paged_by_chunk", preemption_mode="swap", router="random"
    )
    local = scheduler('rank = "mine.py:longest_prompt"').rank
    assert local is scheduler('policy = "mine.py:longest_prompt"').rank
    assert (local.axis, local.name) == ("rank", "longest_prompt")
    assert scheduler('policy = "mine.py:whole"') == Scheduler(batching="mixed", memory="reserve_max")
    with pytest.raises(PolicyError, match="must be a Scheduler or a function decorated with"):
        scheduler('policy = "mine.py:number"')
    with pytest.raises(PolicyError, match=r"has no object named 'nothing'; it has .*longest_prompt"):
        scheduler('rank = "mine.py:nothing"')
    with pytest.raises(PolicyError, match="there is no policy file"):
        scheduler('rank = "theirs.py:x"')
    with pytest.raises(PolicyError, match=r"policy module 'no\.such\.module' cannot be imported"):
        scheduler('rank = "no.such.module:x"')
    with pytest.raises(UnknownNameError, match="scheduler named 'vllm'"):
        scheduler('policy = "vllm"')


def test_a_policy_in_a_module_next_to_the_scenario_is_found(tmp_path):
    (tmp_path / "lengthwise_test_policies.py").write_text(
        "from lengthwise import policy\n@policy.rank\ndef last(arrival_s):\n    return -arrival_s\n"
    )
    found = requested(rest='[scheduler]\nrank = "lengthwise_test_policies:last"', folder=tmp_path)
    assert variants.scheduler(found).rank.name == "last"


def test_a_policy_file_that_raises(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(PolicyError, match=r"broken\.py raised ZeroDivisionError"):
        variants.scheduler(requested(rest='[scheduler]\nrank = "broken.py:x"', folder=tmp_path))


def test_a_deployment_matches_the_file(tmp_path):
    found = requested(
        rest='tp = 2\nkv_dtype = "fp8"\nnum_blocks = 500\n'
        "[engine]\nmax_num_seqs = 9\nblock_size = 32\ntimeout_s = 60\n"
        '[scheduler]\npolicy = "orca"'
    )
    got = variants.deployment(found)
    assert (got.model.name, got.gpu.name, got.parallel.tp) == ("llama-3-8b", "H100", 2)
    assert (got.limits.max_num_seqs, got.limits.timeout_s, got.limits.kv_dtype) == (9, 60, "fp8")
    assert (got.kv.num_blocks, got.kv.block_size) == (500, 32)
    assert got.scheduler == policy.scheduler("orca")


@pytest.mark.parametrize(
    ("change", "kind", "words", "note"),
    [
        ('deployment.model="llama-3-9b"', UnknownNameError, "llama-3-8b", "deployment.model"),
        ('deployment.gpu="H1000"', UnknownNameError, "H100", "deployment.gpu"),
        ('deployment.node="dgx-h10"', UnknownNameError, "dgx-h100", "deployment.node"),
        ('scheduler.policy="vllm"', UnknownNameError, "vllm_v1", "scheduler.policy"),
        ('scheduler.rank="sjff"', UnknownNameError, "sjf", "scheduler.rank"),
        ('deployment.memory_planner="vidr"', UnknownNameError, "vidur", "deployment.memory_planner"),
        ('deployment.kv_dtype="fp7"', UnknownNameError, "fp8", ""),
        ('deployment.model="llama-3.1-405b"', DoesNotFitError, "GiB", ""),
        ("deployment.tp=3", InputError, "tp", ""),
        ('deployment.cost="vidur:nowhere"', InputError, "nowhere", ""),
        ('deployment.cost="tables:nowhere.npz"', InputError, "nowhere", ""),
        ('deployment.model="no/config.json"', InputError, "config.json", ""),
    ],
)
def test_names_and_sizes_that_do_not_work_out(change, kind, words, note):
    found = config.loads(f"[workload]\n{LOAD}\n{DEPLOYMENT}", overrides=[change])
    with pytest.raises(kind, match=words) as caught:
        variants.build(found)
    assert "in scenario" in caught.value.__notes__[0]
    assert note in caught.value.__notes__[0]


def test_a_note_names_the_variant():
    found = requested(rest='[[variants]]\nname = "a"\n[[variants]]\nname = "b"\ndeployment.gpu = "H1"\n')
    with pytest.raises(UnknownNameError) as caught:
        variants.build(found)
    assert caught.value.__notes__ == ["in variant 'b' of scenario, deployment.gpu"]


def test_a_config_json_next_to_the_scenario_is_read(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    found = config.loads(
        f"[workload]\n{LOAD}\n{DEPLOYMENT}", folder=tmp_path, overrides=["deployment.model=config.json"]
    )
    with pytest.raises(InputError, match="hidden_size"):
        variants.build(found)


@pytest.mark.parametrize(
    ("host", "overhead"),
    [
        ('"default"', HostOverhead()),
        ('"sglang"', ENGINE_HOSTS["sglang"]),
        ('{ step_s = "300us", sequence_s = 9e-6 }', HostOverhead(300e-6, 9e-6)),
        ("{ step_s = 0 }", HostOverhead(0.0)),
        ('{ request_s = "20ms", serial_s = "2ms" }', HostOverhead(request_s=0.02, serial_s=0.002)),
    ],
)
def test_the_host_of_a_file_reaches_the_tables_and_the_explanation(host, overhead):
    complete = requested(rest=f"host = {host}\n")
    (variant,) = variants.build(complete)
    assert variant.deployment.cost.host_s[3] == pytest.approx(overhead.step_s + 3 * overhead.sequence_s)
    assert variant.deployment.cost.front == overhead.front
    alone = explain.explain(variant).steps[0].operators[-1]
    assert (alone.name, alone.seconds) == ("host", pytest.approx(overhead.step_s + overhead.sequence_s))
    assert config.loads(complete.to_toml()).deployment.host == complete.deployment.host


def test_variants_differ_by_host():
    rest = 'host = { step_s = "1ms" }\n' + "".join(
        f'[[variants]]\nname = "{name}"\ndeployment.host = {host}\n'
        for name, host in (("a", '"trtllm"'), ("b", "{ sequence_s = 0 }"))
    )
    first, second = variants.build(requested(rest=rest))
    assert first.deployment.cost.host_s[0] == ENGINE_HOSTS["trtllm"].step_s
    assert (second.deployment.cost.host_s == 1e-3).all()
