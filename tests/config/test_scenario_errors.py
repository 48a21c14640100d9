"""Golden messages: what is wrong, where, and what to write instead."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lengthwise import config
from lengthwise.schema.errors import ScenarioError

BASE = {
    "workload": 'isl = 512\nosl = { kind = "lognormal", mean = 200, cv = 1 }\nrequest_rate = 4',
    "deployment": 'model = "llama-3-8b"\ngpu = "H100"',
}


def text(**sections: str) -> str:
    complete = BASE | sections
    tables = [f"[{name}]\n{lines}" for name, lines in complete.items() if name != "variants"]
    return "\n".join([*tables, complete.get("variants", "")])


def message(toml: str, *overrides: str) -> str:
    with pytest.raises(ScenarioError) as caught:
        config.loads(toml, overrides=overrides)
    return str(caught.value)


GOLDEN = [
    (text(engine="max_num_seq = 8"), "engine.max_num_seq: there is no such key; did you mean engine.max_num_seqs?"),
    (text(engin="max_num_seqs = 8"), "engin: there is no such key; did you mean engine?"),
    (
        text(deployment=BASE["deployment"] + "\nmax_num_seqs = 8"),
        "deployment.max_num_seqs: there is no such key; did you mean engine.max_num_seqs?",
    ),
    (
        text(workload=BASE["workload"] + "\nmax_tokens = { kind = 'multiple', times = 0.5 }"),
        "workload.max_tokens.times: must be at least 1; it is 0.5",
    ),
    (
        text(workload=BASE["workload"] + "\nmax_tokens = 'many'"),
        (
            'workload.max_tokens: must be a number of tokens, "none", or a table with a kind (fixed, uniform, zipf, '
            "lognormal, truncated_normal, skew_normal, quantiles, empirical, none, multiple); it is 'many'"
        ),
    ),
    (
        text(workload=BASE["workload"] + "\n[workload.groups]\ncount = 1\nsystem_prompt = 'long'"),
        (
            "workload.groups.system_prompt: must be a number of tokens, or a table with a kind (fixed, uniform, zipf, "
            "lognormal, truncated_normal, skew_normal, quantiles, empirical); it is 'long'"
        ),
    ),
    (
        text(workload=BASE["workload"] + "\n[workload.tools]\ncalls = 1\ntokens = { low = 5 }"),
        (
            "workload.tools.tokens.kind: is missing; it is one of fixed, uniform, zipf, lognormal, truncated_normal, "
            "skew_normal, quantiles, empirical"
        ),
    ),
    (
        text(workload=BASE["workload"] + "\narrivals = 5"),
        (
            "workload.arrivals: must be the name of a kind, or a table with a kind (poisson, constant, gamma, weibull, "
            "elis, all_at_once, rate_profile); it is 5"
        ),
    ),
    (text(workload=BASE["workload"] + "\ntenants = 0"), "workload.tenants: must be at least 1, or a list; it is 0"),
    (text(workload=BASE["workload"] + "\ntenants = [1, -1]"), "workload.tenants.1: must be above 0; it is -1"),
    (
        text(deployment=BASE["deployment"] + '\nhost = "vlm"'),
        (
            "deployment.host: must be one of default, vllm, sglang, trtllm, or a table of step_s and sequence_s; "
            "it is 'vlm'"
        ),
    ),
    (text(deployment=BASE["deployment"] + "\nhost = 5"), "deployment.host: must be a text, or a table; it is 5"),
    (
        text(deployment=BASE["deployment"] + "\nhost = { step = 1 }"),
        "deployment.host.step: there is no such key; did you mean deployment.host.step_s?",
    ),
    (
        text(deployment=BASE["deployment"] + "\nhost = { step_s = -1 }"),
        "deployment.host.step_s: must be at least 0; it is -1",
    ),
    (text(engine="max_step_seqs = 0"), "engine.max_step_seqs: must be at least 1, or 'per_stage'; it is 0"),
    (
        text(predictor='kind = "oracle"\nstatistic = "meen"'),
        (
            'predictor.statistic: a statistic is "mean", "median", a quantile such as "q0.9", or "tail_inflated"; '
            "it is 'meen'"
        ),
    ),
    (
        text(run="colour = 1"),
        "run.colour: there is no such key; known in run are seed, seeds, warmup_s, time_limit_s, strict, model_draws",
    ),
    (
        text(workload=BASE["workload"].replace("cv", "cvv")),
        "workload.output.cvv: there is no such key; did you mean workload.output.cv?",
    ),
    (
        text(workload=BASE["workload"].replace("lognormal", "lognorm")),
        (
            "workload.output: kind must be one of 'fixed', 'uniform', 'zipf', 'lognormal', "
            "'truncated_normal', 'skew_normal', 'quantiles', 'empirical'; it is 'lognorm'"
        ),
    ),
    (
        text(workload="isl = { mean = 5 }\nosl = 1\nqps = 1"),
        (
            "workload.prompt.kind: is missing; it is one of fixed, uniform, zipf, lognormal, "
            "truncated_normal, skew_normal, quantiles, empirical"
        ),
    ),
    (
        text(workload=BASE["workload"].replace("mean", "median")),
        (
            "workload.output: a lognormal takes median and sigma, median and p90, mean and cv, "
            "or mean and sd; given were: cv, median"
        ),
    ),
    (
        text(workload=BASE["workload"].replace("512", "0")),
        "workload.prompt: a length must be at least 1 token; it is 0",
    ),
    (text(deployment='model = "x"\ngpu = "y"\ntp = "four"'), "deployment.tp: must be a whole number; it is 'four'"),
    (text(deployment='model = "x"\ngpu = "y"\ntp = 2.0'), "deployment.tp: must be a whole number; it is 2.0"),
    (text(deployment='model = "x"\ngpu = "y"\ntp = true'), "deployment.tp: must be a whole number; it is true"),
    (text(deployment='model = "x"\ngpu = "y"\ntp = 0'), "deployment.tp: must be at least 1; it is 0"),
    (text(deployment='model = ""\ngpu = "y"'), "deployment.model: must not be empty"),
    (text(deployment='model = "x"'), "deployment.gpu: is missing"),
    (
        text(deployment='model = "x"\ngpu = "y"\ncost = "vidur"'),
        "deployment.cost: must be one of roofline, profile:FILE, vidur:DIR, vidur_forest:DIR, vidur_forest_grid:DIR, tables:FILE; it is 'vidur'",  # noqa: E501 - a sentence as it is printed
    ),
    (text(engine="gpu_memory_utilization = 90"), "engine.gpu_memory_utilization: must be at most 1; it is 90"),
    (
        text(slo='ttft = "200 msec"'),
        ('slo.ttft: must be seconds (2.5) or a text with a unit ("200ms", "2s", "5min", "1h"); it is \'200 msec\''),
    ),
    (text(slo="ttft = -1"), "slo.ttft: must be above 0; it is -1"),
    (text(slo="ttft = nan"), "slo.ttft: must be a number; it is nan"),
    (
        text(slo="tbt = 1"),
        (
            "slo.tbt: times between tokens are pooled over requests, so that no single request can be judged by them; "
            "set a limit for tpot instead. [slo] takes ttft, tpot and jct"
        ),
    ),
    (
        text(workload=BASE["workload"] + '\npredicted = "orcle"'),
        "workload.predicted: must be 'none', 'oracle' or 'mean'; it is 'orcle'; did you mean 'oracle'?",
    ),
    (text(workload=BASE["workload"] + "\nqps = 3"), "workload.qps: means the same as request_rate; keep one of them"),
    (
        text(workload=BASE["workload"] + '\npreset = "chat-1m"'),
        (
            "workload: preset, prompt and output cannot all say what requests look like; keep one of: preset, trace, "
            "or both prompt (isl) and output (osl). --set workload.preset=null drops the preset"
        ),
    ),
    (text(workload="isl = 5\nqps = 1"), "workload: give one of: preset, trace, or both prompt (isl) and output (osl)"),
    (
        text(workload="isl = 5\nosl = 5"),
        'workload: say how requests arrive: request_rate, concurrency, or arrivals = "all_at_once"',
    ),
    (
        text(workload=BASE["workload"] + "\nconcurrency = 3"),
        "workload: concurrency (a closed loop) excludes request_rate (an open one); keep one",
    ),
    (text(workload='isl = 5\nosl = 5\narrivals = "poisson"'), "workload: arrivals of kind poisson needs request_rate"),
    (
        text(workload=BASE["workload"] + '\narrivals = { kind = "gamma", cv = 0 }'),
        "workload.arrivals.cv: must be above 0; it is 0",
    ),
    (
        text(workload=BASE["workload"] + "\ntime_scale = 2"),
        "workload: time_scale stretches the arrivals of a replayed trace; this workload replays none",
    ),
    (text(workload="isl = 5\nosl = 5\nqps = 0"), "workload.request_rate: must be above 0, at least 0.000001; it is 0"),
    (
        text(workload="isl = 5\nosl = 5\nqps = 1e-300"),
        "workload.request_rate: must be above 0, at least 0.000001; it is 1e-300",
    ),
    (text(workload="isl = 5\nosl = 5\nqps = nan"), "workload.request_rate: must be a number; it is nan"),
    (
        text(variants='[[variants]]\nname = "a"\nscheduler.polcy = "orca"'),
        "variants.a.scheduler.polcy: there is no such key; did you mean scheduler.policy?",
    ),
    (
        text(variants='[[variants]]\nname = "a"\n[[variants]]\nname = "a"'),
        "variants.a.name: two variants have this name; give each its own",
    ),
    (
        text(variants='[[variants]]\nname = "a"\nrun.seed = 4'),
        "variants.a.run: variants are compared under one [run]; set it outside of them",
    ),
    (text(variants="[[variants]]\nengine.block_size = 8"), "variants.0.name: is missing"),
    ("[workload\n", "not valid TOML: expected ']' at the end of a table declaration (at line 1, column 10)"),
    (
        "workload = 3\n" + text().split("[deployment]")[0][:0] + "[deployment]\n" + BASE["deployment"],
        "workload: must be a table; it is 3",
    ),
]


@pytest.mark.parametrize(("toml", "expected"), GOLDEN, ids=[expected[:40] for _, expected in GOLDEN])
def test_golden(toml, expected):
    assert message(toml) == f"scenario: {expected}"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("tp=4", "--set tp: there is no such key; did you mean deployment.tp?"),
        ("deployment.gpus=4", "--set deployment.gpus: there is no such key; did you mean deployment.gpu?"),
        ("deployment.tps=4", "--set deployment.tps: there is no such key; did you mean deployment.tp?"),
        ("deployment.tp=four", "--set deployment.tp: must be a whole number; it is 'four'"),
        ("slo.ttft=-1s", "--set slo.ttft: must not be negative; it is '-1s'"),
        (
            "slo.ttft.p95=1s",
            (
                'slo.ttft: must be one time for each request, such as "2s"; limits on quantiles belong to '
                "[search.limits]. It is {'p95': '1s'}"
            ),
        ),
        ("search.limits={'ttft.p95'='-1s'}", "--set search.limits.ttft.p95: must not be negative; it is '-1s'"),
        (
            "search.limits={'ttft.p95'='soon'}",
            (
                '--set search.limits.ttft.p95: must be seconds (2.5) or a text with a unit ("200ms", "2s", "5min", '
                "\"1h\"); it is 'soon'"
            ),
        ),
        ("search.space.pp=[0, 2]", "--set search.space.deployment.pp: must be at least 1; it is 0"),
        (
            "schedule.strategies=['rr']",
            "--set schedule.strategies: there is no strategy named 'rr'. Did you mean: rra?",
        ),
        ("deployment.tensor_parallel_size=0", "--set deployment.tp: must be at least 1; it is 0"),
        ("workload.output.cv=-1", "workload.output: mean must be above 0 and cv not negative; they are 200.0 and -1.0"),
        *(
            (
                f"slo.{key}=50",
                (
                    f"--set slo.{key}: times between tokens are pooled over requests, "
                    "so that no single request can be judged by them; "
                    "set a limit for tpot instead. [slo] takes ttft, tpot and jct"
                ),
            )
            for key in ("tbt", "tbt_ms")
        ),
    ],
)
def test_golden_overrides(override, expected):
    assert message(text(slo="ttft = 1"), override) == f"scenario: {expected}"


def test_messages_about_an_option_name_the_option():
    limits = ("--limit", "search.limits={'ttft.p95'='fast', 'tpot.p95'=1}")
    assert message(text(), limits, ("--precision", "search.precision=0"), "deployment.tp=0").splitlines() == [
        "scenario: 3 problems",
        "  --set deployment.tp: must be at least 1; it is 0",
        "  --precision: must be above 0; it is 0",
        '  --limit ttft.p95: must be seconds (2.5) or a text with a unit ("200ms", "2s", "5min", "1h"); it is \'fast\'',
    ]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("deployment.tp", "--set takes path=value, such as deployment.tp=4; it was given 'deployment.tp'"),
        ("=4", "--set takes path=value, such as deployment.tp=4; it was given '=4'"),
        ("a..b=4", "--set takes path=value, such as deployment.tp=4; it was given 'a..b=4'"),
    ],
)
def test_assignments_that_are_none(override, expected):
    assert message(text(), override) == expected


def test_a_value_that_starts_as_toml_must_be_toml():
    assert message(text(), "workload.isl={kind=").startswith("--set workload.isl: {kind= is not TOML")


def test_all_problems_are_listed_at_once_and_at_most_ten_lines():
    assert message(text(engine="a = 1\nblock_size = 0", run="seeds = 0")).splitlines() == [
        "scenario: 3 problems",
        "  engine.block_size: must be at least 1; it is 0",
        (
            "  engine.a: there is no such key; known in engine are name, max_num_seqs, max_num_batched_tokens, "
            "block_size, gpu_memory_utilization, max_model_len, max_step_seqs, watermark, timeout_s, "
            "enable_prefix_caching, prefix_cache, radix_eviction_policy, kv_offloading, max_in_flight"
        ),
        "  run.seeds: must be at least 1; it is 0",
    ]
    many = message(text(engine="\n".join(f"zz{i} = 1" for i in range(30)))).splitlines()
    assert len(many) == 11
    assert (many[0], many[-1]) == ("scenario: 30 problems", "  ... and 21 more")


def test_a_problem_of_the_base_is_not_repeated_for_each_variant():
    variants = '[[variants]]\nname = "a"\n[[variants]]\nname = "b"\n'
    assert message(text(engine="block_size = 0", variants=variants)) == (
        "scenario: engine.block_size: must be at least 1; it is 0"
    )


def test_yaml_traps():
    with pytest.raises(ScenarioError, match="key 'tp' is repeated"):
        config.loads("deployment: {tp: 1, tp: 2}", suffix=".yaml")
    with pytest.raises(ScenarioError, match="not valid YAML"):
        config.loads("a: [", suffix=".yaml")
    with pytest.raises(ScenarioError, match="a scenario is a table of sections; this is a list"):
        config.loads("- 1", suffix=".yaml")
    with pytest.raises(ScenarioError, match="not valid YAML"):
        config.loads("a: !!python/object/apply:os.getcwd []", suffix=".yaml")


_WORDS = """
name workload deployment engine scheduler slo run variants prompt isl output arrivals kind tokens low mean cv
preset trace concurrency qps request_rate tp model gpu cost ttft ttft_ms tbt seeds timeout_s policy rank
scheduler.policy workload.prompt a.b.c .
"""
_KEYS = st.sampled_from(_WORDS.split())
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.dates()
    | st.sampled_from(["", "x", "uniform", "lognormal", "gamma", "200ms", "roofline", "sarathi", "9" * 400 + "s"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(raw=st.dictionaries(_KEYS, _VALUES, max_size=6), base=st.booleans())
def test_whatever_a_file_holds_it_loads_or_it_is_a_scenario_error(raw, base):
    complete = {"workload": {"prompt": 5, "output": 5, "concurrency": 2}, "deployment": {"model": "x", "gpu": "y"}}
    try:
        found = config.loads(yaml.safe_dump((complete if base else {}) | raw), suffix=".yaml")
    except ScenarioError as error:
        assert str(error).startswith("scenario: ")  # noqa: PT017 - both endings are right
    else:
        assert found.variant_scenarios()
