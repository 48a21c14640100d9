"""[scheduler] sets preemption, bins, bounds on waiting, and parameters of policies."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from lengthwise import config, policy
from lengthwise.cost import ENGINE_HOSTS
from lengthwise.engine import simulate
from lengthwise.schema.deployment import Scheduler, SglangSettings, TrtllmSettings
from lengthwise.schema.errors import InputError, PolicyError, ScenarioError, UnknownNameError
from lengthwise.schema.records import Status
from lengthwise.usecases import explain, search, variants
from lengthwise.usecases.simulate import run

TEXT = """
[workload]
num_requests = 2000
request_rate = 6
isl = 200
osl = { kind = "lognormal", mean = 200, sd = 200 }
predicted = "oracle"
[deployment]
model = "llama-3-8b"
gpu = "H100"
[engine]
max_num_seqs = 8
"""


def built(scheduler, *changes, text=TEXT):
    settings = "\n".join(f"{key} = {value}" for key, value in scheduler.items())
    found = config.loads(f"{text}\n[scheduler]\n{settings}", overrides=list(changes))
    return variants.build(found)[0].deployment.scheduler


def test_every_key_reaches_the_engine():
    made = built(
        {
            "policy": '"isrtf"',
            "rank": '"aged(weight=20)"',
            "preemption": '"worth(factor=2, max_preemptions=3)"',
            "binning": '"bins(boundaries=[100, 300])"',
            "max_wait": '"2min"',
            "batch_wait_s": 1.5,
            "window": 20,
        }
    )
    assert (made.rank, made.preemption) == ("aged(weight=20)", "worth(factor=2, max_preemptions=3)")
    assert policy.resolve("binning", made.binning).bins == 3
    assert (made.max_wait_s, made.batch_wait_s, made.preemption_interval_steps) == (120, 1.5, 20)
    assert made.batching == "unified"


def test_unset_options_come_from_the_named_scheduler():
    made = built({"policy": '"elis"'})
    assert made == policy.scheduler("elis")
    assert built({"policy": '"multi_bin"', "binning": '"none"'}).binning is None
    assert built({"policy": '"multi_bin"', "max_wait_s": "inf"}).max_wait_s == math.inf


def test_parameters_come_by_set_and_in_variants_too():
    assert built({}, "scheduler.rank=aged(weight=3)").rank == "aged(weight=3)"
    assert built({}, "scheduler.binning=bins(boundaries=[10, 20])").binning == "bins(boundaries=[10, 20])"
    text = TEXT + '[[variants]]\nname = "a"\nscheduler.rank = "mlfq"\nscheduler.max_wait_s = "9s"\n'
    (variant,) = variants.build(config.loads(text))
    assert (variant.deployment.scheduler.rank, variant.deployment.scheduler.max_wait_s) == ("mlfq", 9)


def test_effective_settings_load_again():
    complete = config.loads(TEXT + '[scheduler]\nrank = "aged(weight=3)"\nbinning = "learned(k=4)"\nmax_wait_s = "9s"')
    assert config.loads(complete.to_toml()).scheduler == complete.scheduler


@pytest.mark.parametrize("rule", ["equal_mass", "uniform_optimal", "exponential", "learned"])
def test_bins_are_cut_from_other_requests_of_the_workload(rule):
    first, again, other = (
        built({"policy": '"multi_bin"', "binning": f'"{rule}(k=4)"'}, f"run.seed={seed}") for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other, "another seed has other requests"
    assert policy.resolve("binning", first.binning).bins == 4


def test_equal_masses_are_equal_on_requests_not_seen():
    made = built({"policy": '"multi_bin"', "binning": '"equal_mass(k=4)"'})
    bin_of = policy.interpreted(policy.resolve("binning", made.binning))
    (variant,) = variants.build(config.loads(TEXT))
    bins = [bin_of(float(tokens), 1) for tokens in variant.workload(0).output_tokens]
    assert np.bincount(bins, minlength=4) / 2000 == pytest.approx(0.25, abs=0.05)


def test_lengths_that_are_all_alike_leave_one_bin():
    fixed = TEXT.replace('{ kind = "lognormal", mean = 200, sd = 200 }', "50")
    for rule in ("equal_mass", "uniform_optimal", "learned"):
        made = built({"policy": '"multi_bin"', "binning": f'"{rule}(k=4)"'}, text=fixed)
        bin_of = policy.interpreted(policy.resolve("binning", made.binning))
        assert bin_of(50.0, 1) == 0


WRONG = [
    ("rank", "agd(weight=2)", UnknownNameError, r"no rank policy named 'agd'.*aged"),
    ("rank", "aged(wieght=2)", PolicyError, r"unexpected keyword argument 'wieght'; it takes weight=10.0"),
    ("rank", "aged(weight=-2)", PolicyError, "weight must be above 0"),
    ("rank", "aged(20)", PolicyError, r"written like name\(key=1, other=2\)"),
    ("rank", "mlfq(quantum=2.5)", PolicyError, "2.5 must be a whole number"),
    ("preemption", "by_rnk", UnknownNameError, "Did you mean: by_rank"),
    ("binning", "equalmass(k=3)", UnknownNameError, "no binning policy named 'equalmass'"),
    ("binning", "equal_mas(k=3)", UnknownNameError, r"Did you mean: equal_mass\(k=8\)"),
    ("policy", "aged(weight=20)", PolicyError, r'it is a rank: give scheduler.rank = "aged\(weight=20\)"'),
    ("policy", "learned(k=4)", PolicyError, "give scheduler.binning"),
    ("binning", "equal_mass", PolicyError, r"takes a number of bins from 1 to 1024, as in equal_mass\(k=8\)"),
    ("binning", "equal_mass(k=0)", PolicyError, "takes a number of bins from 1"),
    ("binning", "equal_mass(bins=4)", PolicyError, "takes a number of bins from 1"),
    ("binning", "bins(boundaries=[30, 10])", PolicyError, "boundaries must be finite and increase"),
    ("binning", "bins(boundaries=[1, 'a'])", PolicyError, "'a' must be a number"),
    ("max_wait_s", "-1", ScenarioError, "must be at least 0"),
    ("max_wait_s", "soon", ScenarioError, "must be seconds"),
    ("preemption_interval_steps", "0", ScenarioError, "at least 1"),
    ("preemtion", "never", ScenarioError, "did you mean scheduler.preemption"),
]


@pytest.mark.parametrize(("key", "value", "error", "report"), WRONG, ids=lambda x: str(x)[:24])
def test_errors_are_reported_before_anything_runs(key, value, error, report):
    with pytest.raises(error, match=report) as caught:
        built({}, f"scheduler.{key}={value}")
    assert "\n" not in str(caught.value)


def test_sglang_has_its_own_settings():
    limits = TEXT.replace("isl = 200", "isl = 200\nmax_tokens = 2000")
    assert built({"policy": '"sglang"'}, text=limits) == policy.scheduler("sglang")
    table = "{ schedule_conservativeness = 0.3, max_prefill_tokens = 4096, enable_mixed_chunk = true }"
    made = built({"policy": '"sglang"', "rank": '"sjf"', "sglang": table}, text=limits)
    assert made == Scheduler("sjf", sglang=SglangSettings(0.3, 4096, enable_mixed_chunk=True))
    with pytest.raises(InputError, match="the policy is 'vllm_v1'"):
        built({"sglang": table})
    with pytest.raises(ScenarioError, match="schedule_conservativeness"):
        built({"policy": '"sglang"', "sglang": "{ schedule_conservativeness = -1 }"})


def test_trtllm_has_its_own_settings():
    limits = TEXT.replace("isl = 200", "isl = 200\nmax_tokens = 2000")
    assert built({"policy": '"trtllm"'}, text=limits) == policy.scheduler("trtllm")
    table = '{ enable_chunked_prefill = true, context_chunking_policy = "EQUAL_PROGRESS" }'
    made = built({"policy": '"trtllm"', "rank": '"sjf"', "trtllm": table}, text=limits)
    assert made == Scheduler("sjf", trtllm=TrtllmSettings("GUARANTEED_NO_EVICT", True, "EQUAL_PROGRESS"))
    with pytest.raises(InputError, match=r"scheduler\.trtllm has settings .* the policy is 'sglang'"):
        built({"policy": '"sglang"', "trtllm": table}, text=limits)
    with pytest.raises(ScenarioError, match="MAX_UTILIZATION"):
        built({"policy": '"trtllm"', "trtllm": '{ capacity_scheduler_policy = "max_utilization" }'})


@pytest.mark.parametrize("name", ["vllm_v1", "sglang", "trtllm"])
def test_memory_is_reserved_by_predicted_length_by_the_rules_of_three_engines(name):
    limits = TEXT.replace("isl = 200", "isl = 200\nmax_tokens = 2000")
    own = {"trtllm": '{ capacity_scheduler_policy = "MAX_UTILIZATION" }'} if name == "trtllm" else {}
    reserve = {"reserve": "true", "max_recompute_share": "0.1", "max_preemptions_per_request": "0.25"}
    made = built({"policy": f'"{name}"', **reserve, **own}, text=limits)
    settings = TrtllmSettings("MAX_UTILIZATION") if name == "trtllm" else made.trtllm
    expected = replace(policy.scheduler(name), reserve=True, max_recompute_share=0.1, trtllm=settings)
    assert made == replace(expected, max_preemptions_per_request=0.25)


def test_other_rules_cannot_reserve_by_predicted_length():
    with pytest.raises(InputError, match="reserve = true needs the rules of"):
        built({"policy": '"orca"', "reserve": "true"})
    with pytest.raises(ScenarioError, match="max_recompute_share"):
        built({"reserve": "true", "max_recompute_share": "-1"})
    for key in ("max_recompute_share", "max_preemptions_per_request"):
        with pytest.raises(InputError, match=f"{key} needs reserve = true"):
            built({key: "0.1"})


def test_bins_need_predictions():
    blind = TEXT.replace('predicted = "oracle"', "")
    with pytest.raises(PolicyError, match="needs predicted output lengths, and this workload has none"):
        built({"binning": '"learned(k=4)"'}, text=blind)


def test_a_search_may_vary_them():
    text = TEXT + '[search.space]\nrank = ["sjf", "aged(weight=20)"]\nmax_wait_s = ["30s", inf]\nbinning = "none"\n'
    requested = search.questions(config.loads(text))[0]
    found = config.loads(text).search.space
    assert set(found) == {"scheduler.rank", "scheduler.max_wait_s", "scheduler.binning"}
    assert requested.bench is not None
    with pytest.raises(InputError, match="must be seconds"):
        config.loads(TEXT + '[search.space]\nmax_wait_s = ["soon"]\n')


def test_tenants_are_drawn():
    (variant,) = variants.build(config.loads(TEXT.replace("isl = 200", "isl = 200\ntenants = [9, 1]")))
    assert np.mean(variant.workload(0).tenant) == pytest.approx(0.1, abs=0.03)
    with pytest.raises(ScenarioError, match="tenants"):
        config.loads(TEXT.replace("isl = 200", "isl = 200\ntenants = 0"))


ENGINES = """
engine = "sglang"
workload = { isl = 200, osl = 20, max_tokens = 40, request_rate = 1.0, num_requests = 10 }
deployment = { model = "llama-3-8b", gpu = "H100" }
"""


CACHED = "engine.enable_prefix_caching=true"


def engine_settings(scenario):
    engine = scenario.engine
    limits = (engine.max_num_batched_tokens, engine.max_num_seqs, engine.block_size, engine.prefix_cache)
    return scenario.scheduler.policy, scenario.deployment.host, *limits


def test_a_named_engine_has_its_scheduler_host_and_limits():
    one = config.loads(ENGINES)
    assert engine_settings(one) == ("sglang", "sglang", 8192, 2048, 1, "sglang")
    assert engine_settings(config.loads(ENGINES, overrides=["engine=vllm"])) == (
        "vllm_v1", "vllm", 8192, 1024, 16, "vllm"
    )  # fmt: skip
    assert engine_settings(config.loads(ENGINES, overrides=["engine=trtllm"])) == (
        "trtllm", "trtllm", 8192, 2048, 32, "vllm"
    )  # fmt: skip
    small = config.loads(ENGINES, overrides=["deployment.gpu=A100-80GB", "engine=vllm"])
    assert engine_settings(small)[2:4] == (2048, 256)
    made = variants.deployment(one)
    assert made.scheduler == replace(policy.scheduler("sglang"), async_scheduling=True)
    assert made.kv.block_size == 1
    assert config.loads(one.to_toml()).model_dump() == one.model_dump()


def test_sglangs_radix_cache_is_on_unless_the_scenario_turns_it_off():
    on, off = (
        variants.deployment(config.loads(ENGINES, overrides=more)).limits
        for more in ([], ["engine.enable_prefix_caching=false"])
    )
    assert (on.enable_prefix_caching, on.prefix_cache) == (True, "sglang")
    assert not off.enable_prefix_caching
    assert not config.loads(ENGINES).notes
    # TensorRT-LLM's rules refuse a cache, so that no note says first what a cache would help.
    cached = [config.loads(ENGINES, overrides=[f"engine={name}", CACHED]).notes for name in ("vllm", "trtllm")]
    assert [len(notes) for notes in cached] == [1, 0]


OVERLAPS = [
    ("vllm", [], "", 0.92, True),
    ("sglang", [], "", 0.9, True),
    ("trtllm", [], None, 0.9, False),
    ("vllm", ["deployment.pp=2"], "not modelled with pipeline parallelism", 0.92, True),
    ("vllm", ["deployment.decode={}"], "not modelled with disaggregation", 0.92, True),
    ("vllm", ["deployment.model=gpt-oss-20b"], "", 0.92, True),
    ("vllm", ["deployment.model=qwen3-next-80b-a3b", "deployment.tp=4"], "with a prefix cache of states", 0.92, True),
    ("vllm", ["deployment.gpu=CPU"], "in turn on a CPU", 0.92, True),
    ("sglang", ["scheduler.reserve=true", "workload.predicted=oracle"], "reserve = true is not modelled", 0.9, True),
    ("vllm", ["scheduler.async_scheduling=false", "engine.gpu_memory_utilization=0.8"], None, 0.8, True),
]


@pytest.mark.parametrize(("name", "given", "refusal", "share", "caches"), OVERLAPS)
def test_a_named_engine_has_its_servers_defaults_where_they_are_modelled(name, given, refusal, share, caches):
    """Overlap, prefix cache and share of memory. A refusal is None where the engine or the scenario has no overlap."""
    scenario = config.loads(ENGINES, overrides=[f"engine={name}", *given])
    (variant,) = variants.build(scenario)
    made = variant.deployment
    assert made.scheduler.async_scheduling == (refusal == "")
    assert variants.overlaps_by_engine(scenario) == (refusal is not None)
    reason = variants.overlap_refusal(replace(made, scheduler=replace(made.scheduler, async_scheduling=False)))
    assert refusal is None or (refusal in reason and bool(refusal) == bool(reason))
    assert (made.limits.gpu_memory_utilization, made.limits.enable_prefix_caching) == (share, caches)
    assert (simulate(variant.workload(0), made, seed=0).requests.status == Status.FINISHED).all()


def test_groups_of_replicas_overlap_together_or_not_at_all():
    text = ENGINES.replace('"sglang"', '"vllm"').replace('deployment = { model = "llama-3-8b", gpu = "H100" }', "")
    text += '[deployment]\nmodel = "llama-3-8b"\ngpu = "H100"\n' + "[[deployment.groups]]\nreplicas = 1\n" * 2
    assert variants.deployment(config.loads(text)).scheduler.async_scheduling
    mixed = variants.deployment(config.loads(text + "pp = 2\n"))
    assert not any(one.scheduler.async_scheduling for one in mixed.replica_groups)


@pytest.mark.parametrize(
    "both",
    [
        '[[variants]]\nname = "a"\nengine = "trtllm"\n[[variants]]\nname = "b"\n',
        '[search]\nspace = { engine = ["vllm", "trtllm"] }\n',
    ],
    ids=["variants", "search"],
)
def test_a_comparison_of_engines_of_which_one_caches_prefixes_is_noted(both):
    shared = ["workload.groups={ count = 2, system_prompt = 100 }"]
    (note,) = config.loads(ENGINES + both, overrides=shared).notes
    assert "The server of TensorRT-LLM does so by default, too, which is not modelled" in note
    assert not config.loads(ENGINES + both).notes
    assert not config.loads(ENGINES + both, overrides=[*shared, "engine.enable_prefix_caching=true"]).notes


def test_sglangs_order_of_the_queue_is_a_setting():
    given = ["scheduler.sglang.schedule_policy=lpm", "workload.groups={ count = 2, system_prompt = 100 }"]
    (variant,) = variants.build(config.loads(ENGINES, overrides=given))
    assert variant.deployment.scheduler.sglang.schedule_policy == "lpm"
    assert simulate(variant.workload(0), variant.deployment, seed=0).requests.cached_tokens.sum() > 0
    with pytest.raises(ScenarioError, match=r"scheduler\.sglang\.schedule_policy.*'fcfs', 'lpm', 'dfs-weight', 'lof'"):
        config.loads(ENGINES, overrides=["scheduler.sglang.schedule_policy=lmp"])


def test_what_a_scenario_gives_precedes_the_defaults_of_its_engine():
    given = ["engine.block_size=16", "deployment.host=default", "scheduler.rank=sjf", "workload.predicted=oracle"]
    one = config.loads(ENGINES, overrides=given)
    assert engine_settings(one) == ("sglang", "default", 8192, 2048, 16, "sglang")
    assert variants.deployment(one).scheduler.rank == "sjf"
    # Calibrated tables bring the host of the engine that was measured.
    assert config.loads(ENGINES, overrides=["deployment.cost=tables:t.npz"]).deployment.host == "default"


def test_variants_and_searches_take_the_defaults_of_their_own_engine():
    both = config.loads(ENGINES + '[[variants]]\nname = "a"\nengine = "vllm"\n[[variants]]\nname = "b"\n')
    assert [variant.deployment.scheduler.sglang is None for variant in variants.build(both)] == [True, False]
    engines = ("vllm", "sglang", "trtllm")
    axis = ENGINES.replace('engine = "sglang"', "") + f"[search]\nspace = {{ engine = {list(engines)} }}\n"
    (question,) = search.questions(config.loads(axis))
    made = [question.bench.build({"engine.name": name}) for name in engines]
    assert [one.limits.block_size for one in made] == [16, 1, 32]
    assert [one.cost.host_s[0] for one in made] == [ENGINE_HOSTS[name].step_s for name in engines]


def test_explain_agrees_with_what_limits_reserve():
    text = """
    engine = { name = "trtllm", max_num_batched_tokens = 8192 }
    workload = { isl = 300, osl = 100, max_tokens = 1100, request_rate = inf, num_requests = 50 }
    deployment = { model = "llama-3-8b", gpu = "H100", num_blocks = 1000 }
    """
    (variant,) = variants.build(config.loads(text))
    found, steps = explain.explain(variant), simulate(variant.workload(0), variant.deployment, seed=0).steps
    assert found.fits[0].reserved_tokens == 44 * 32
    assert (steps.decode_seqs + steps.prefill_seqs).max() == found.fits[0].seqs == 1000 // 44
    (endless,) = variants.build(config.loads(text, overrides=["workload.max_tokens=none"]))
    with pytest.raises(InputError, match='"trtllm" with GUARANTEED_NO_EVICT admits requests by their max_tokens'):
        explain.explain(endless)


@pytest.mark.parametrize("name", ["sglang", "trtllm"])
def test_an_engine_with_its_own_rules_has_no_decode_side(name):
    two_sides = ENGINES.replace('gpu = "H100"', 'gpu = "H100", decode = {}').replace('"sglang"', f'"{name}"')
    (variant,) = variants.build(config.loads(two_sides))
    with pytest.raises(InputError, match=f'"{name}" is not modelled with disaggregation yet'):
        simulate(variant.workload(0), variant.deployment, seed=0)


@pytest.mark.parametrize(
    ("given", "report", "note"),
    [
        (["engine=trtllm", "workload.max_tokens=none"], "GUARANTEED_NO_EVICT admits", 'policy = "trtllm"'),
        (["engine.prefix_cache=vllm"], "SGLang's own prefix", '"sglang" and engine.enable_prefix_caching = true'),
        (["engine=trtllm", "engine.max_num_batched_tokens=9"], "of at least", '"trtllm" and .*max_num_seqs = 2048'),
        (["scheduler.policy=sglang", "workload.max_tokens=none"], "admits requests by", None),
        # What the rules do not cover comes before what the workload must have.
        (["engine.max_model_len=230", "deployment.pp=2"], "not modelled with pipeline", 'policy = "sglang"'),
        (["workload.max_tokens=none", "deployment.pp=2"], "not modelled with pipeline", 'policy = "sglang"'),
    ],
)  # fmt: skip
def test_an_error_says_which_of_its_settings_the_engine_sets(given, report, note):
    with pytest.raises(InputError, match=report) as found:
        run(config.loads(ENGINES, overrides=given))
    from_engine = [one for one in found.value.__notes__ if one.startswith("engine = ")]
    assert len(from_engine) == (note is not None)
    assert all(re.search(note, one) for one in from_engine)


def test_an_unknown_engine_is_reported():
    with pytest.raises(ScenarioError, match=r"engine.name.*'vllm', 'sglang' or 'trtllm'"):
        config.loads(ENGINES.replace('"sglang"', '"sgl"'))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_scenario_schedules_asynchronously(engine):
    text = ENGINES.replace('"sglang"', f'"{engine}"')
    plain, ahead = (
        variants.build(config.loads(text, overrides=[f"scheduler.async_scheduling={value}"]))[0]
        for value in ("false", "true")
    )
    assert (plain.deployment.scheduler.async_scheduling, ahead.deployment.scheduler.async_scheduling) == (False, True)
    waste = [simulate(one.workload(0), one.deployment, seed=0).totals.tokens.sum() for one in (plain, ahead)]
    assert waste[1] > waste[0]  # ends by EOS decode once more
    text = ENGINES.replace('"sglang"', '"trtllm"')
    (wrong,) = variants.build(config.loads(text, overrides=["scheduler.async_scheduling=true"]))
    with pytest.raises(InputError, match='async_scheduling is not modelled with scheduler "trtllm" yet'):
        simulate(wrong.workload(0), wrong.deployment, seed=0)


def test_a_scenario_computes_long_prompts_side_by_side():
    text = ENGINES.replace('"sglang"', '"vllm"')
    (made,) = variants.build(config.loads(text, overrides=["scheduler.long_prefill_token_threshold=100"]))
    assert made.deployment.scheduler.long_prefill_token_threshold == 100
    steps = simulate(made.workload(0), made.deployment, seed=0).steps
    busy = steps.decode_seqs + steps.prefill_seqs > 1
    assert (steps.prefill_tokens <= 100 * steps.prefill_seqs)[busy].all()
    mixed = explain.explain(made).steps[-1]
    assert mixed.tokens == made.deployment.limits.max_num_batched_tokens
    with pytest.raises(ScenarioError, match="long_prefill_token_threshold: must be at least 0; it is -1"):
        config.loads(text, overrides=["scheduler.long_prefill_token_threshold=-1"])
    (wrong,) = variants.build(config.loads(ENGINES, overrides=["scheduler.long_prefill_token_threshold=100"]))
    with pytest.raises(InputError, match='long_prefill_token_threshold is not modelled with scheduler "sglang" yet'):
        simulate(wrong.workload(0), wrong.deployment, seed=0)
