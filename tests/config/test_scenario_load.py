"""From a file to a checked scenario."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise import config
from lengthwise.config.search_space import unit_notes
from lengthwise.schema.errors import ScenarioError

SMALL = """
[workload]
isl = 512
osl = 128
qps = 4.0
num_prompts = 50

[deployment]
model = "llama-3-8b"
hardware = "H100"
tensor_parallel_size = 2

[engine]
max-num-seqs = 64
chunk_size = 512

[slo]
ttft_ms = 200
tpot = "50ms"
e2e = 30

[run]
warmup = "1min"
"""


def test_other_tools_spellings_mean_our_keys():
    found = config.loads(SMALL)
    assert found.workload.prompt.model_dump() == {"kind": "fixed", "tokens": 512}
    assert found.workload.output.tokens == 128
    assert (found.workload.request_rate, found.workload.num_requests) == (4.0, 50)
    assert (found.deployment.gpu, found.deployment.tp) == ("H100", 2)
    assert (found.engine.max_num_seqs, found.engine.max_num_batched_tokens) == (64, 512)
    assert (found.slo.ttft, found.slo.tpot, found.slo.jct) == (0.2, 0.05, 30)
    assert found.run.warmup_s == 60


def test_later_overrides_win_and_take_bare_words_numbers_and_tables():
    found = config.loads(
        SMALL,
        overrides=[
            "deployment.tp=4",
            "deployment.tensor_parallel_size=8",
            "deployment.gpu=A100-80GB",
            "scheduler=sarathi",
            "scheduler.rank=sjf",
            "slo.ttft=1.5s",
            "run.strict=true",
            "workload.osl={kind='uniform', min=1, max=9}",
            "engine.timeout_s=inf",
        ],
    )
    assert (found.deployment.tp, found.deployment.gpu) == (8, "A100-80GB")
    assert (found.scheduler.policy, found.scheduler.rank) == ("sarathi", "sjf")
    assert (found.slo.ttft, found.run.strict) == (1.5, True)
    assert found.workload.output.model_dump() == {"kind": "uniform", "low": 1, "high": 9}


@pytest.mark.parametrize(
    ("override", "retained"),
    [
        ("workload.concurrency=8", {"concurrency": 8, "request_rate": None, "prompt": True}),
        ("workload.preset=chat-1m", {"preset": "chat-1m", "prompt": None, "request_rate": 4.0}),
        ("workload.arrivals=all_at_once", {"request_rate": None, "concurrency": None, "prompt": True}),
        ("workload.trace=x.csv", {"trace": "x.csv", "prompt": None, "output": None, "request_rate": 4.0}),
        ("workload.request_rate=inf", {"request_rate": float("inf"), "prompt": True}),
    ],
)
def test_a_new_source_or_load_drops_the_old_one(override, retained):
    found = config.loads(SMALL, overrides=[override]).workload
    for key, value in retained.items():
        assert getattr(found, key) is not None if value is True else getattr(found, key) == value


LONG = (
    SMALL.replace('tpot = "50ms"', "tpot = 50")
    + """
[schedule]
latency_bound = 5000
[search.limits]
ttft.p90 = 800
tbt.p99 = 0.2
jct.p99 = "20min"
within_slo = 0.99
[[variants]]
name = "b"
search.limits.tbt.p99 = 200
"""
)


def test_long_times_without_unit_get_a_note():
    text = LONG.replace("ttft_ms = 200", "")
    assert {*config.loads(text, overrides=["slo.ttft=500"]).notes} == {
        f'{key} = {value} is {value} s; write "{value}ms" if you mean milliseconds'
        for key, value in {
            "slo.tpot": 50, "slo.ttft": 500, "schedule.latency_bound": 5000, "search.limits.ttft.p90": 800,
            "variants.b.search.limits.tbt.p99": 200,
        }.items()
    }  # fmt: skip
    stated = ["slo.ttft=500s", "slo.tpot=5", "schedule.latency_bound=inf", "search=null"]
    assert config.loads(SMALL, overrides=stated).notes == ()


def test_yaml_is_equivalent_to_toml():
    text = """
workload: {isl: 512, osl: 128, qps: 4e0, num_prompts: 50}
deployment: {model: llama-3-8b, hardware: H100, tensor_parallel_size: 2}
engine: {max-num-seqs: 64, chunk_size: 512}
slo: {ttft_ms: 200, tpot: 50ms, e2e: 30}
run: {warmup: 1min}
"""
    assert config.loads(text, suffix=".yaml") == config.loads(SMALL)


def test_variants_lay_dotted_nested_and_quoted_keys_over_the_base():
    found = config.loads(
        SMALL
        + """
[[variants]]
name = "a"
scheduler.policy = "orca"
deployment.tensor_parallel_size = 8
[[variants]]
name = "b"
"engine.max_num_seqs" = 8
[variants.workload]
concurrency = 3
"""
    )
    a, b = found.variant_scenarios()
    assert (a.name, a.scheduler.policy, a.deployment.tp, a.engine.max_num_seqs) == ("a", "orca", 8, 64)
    assert (b.name, b.scheduler.policy, b.deployment.tp, b.engine.max_num_seqs) == ("b", "vllm_v1", 2, 8)
    assert (b.workload.concurrency, b.workload.request_rate) == (3, None)
    assert a.variants == b.variants == []


def test_a_scenario_without_variants_is_its_own_only_one():
    found = config.loads(SMALL)
    assert found.variant_scenarios() == [found]


def test_a_nameless_scenario_takes_the_name_of_its_file(tmp_path):
    path = tmp_path / "night-shift.toml"
    path.write_text(SMALL)
    found = config.load(path)
    assert (found.name, found.folder) == ("night-shift", tmp_path)


def test_with_run_checks_what_it_changes():
    found = config.loads(SMALL)
    assert found.with_run(seeds=7).run.seeds == 7
    with pytest.raises(ValueError, match="seeds"):
        found.with_run(seeds=0)


EXAMPLES = sorted(
    path
    for path in (Path(__file__).parents[2] / "examples").iterdir()
    if path.suffix in (".toml", ".yaml") and not path.stem.startswith("gateway")
)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_load_and_survive_a_round_trip(path):
    found = config.load(path)
    again = config.loads(found.to_toml(), folder=found.folder)
    assert again.model_dump() == found.model_dump()
    assert [e.model_dump() for e in again.variant_scenarios()] == [e.model_dump() for e in found.variant_scenarios()]


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
_LENGTH = st.one_of(
    st.integers(1, 4096).map(lambda n: {"kind": "fixed", "tokens": n}),
    st.tuples(st.integers(1, 99), st.integers(100, 999)).map(lambda t: {"kind": "uniform", "low": t[0], "high": t[1]}),
    st.tuples(st.floats(1, 1e4), st.floats(0.01, 4)).map(lambda t: {"kind": "lognormal", "mean": t[0], "cv": t[1]}),
    st.lists(st.floats(1, 1e5), min_size=1, max_size=5).map(lambda v: {"kind": "empirical", "tokens": v}),
)


_RAW = st.fixed_dictionaries(
    {
        "name": _TEXT,
        "workload": st.fixed_dictionaries({"prompt": _LENGTH, "output": _LENGTH, "request_rate": st.floats(1e-3, 1e6)}),
        "deployment": st.fixed_dictionaries({"model": _TEXT, "gpu": _TEXT}),
        "slo": st.fixed_dictionaries({}, optional={"ttft": st.floats(1e-6, 1e6)}),
        "variants": st.lists(
            st.fixed_dictionaries({"name": _TEXT, "engine": st.just({"max_num_seqs": 8})}),
            max_size=3,
            unique_by=lambda variant: variant["name"],
        ),
    }
)


@given(raw=_RAW)
def test_what_to_toml_writes_loads_to_an_equal_scenario(raw):
    found = config.Scenario.model_validate(raw)
    again = config.loads(found.to_toml())
    assert again.model_dump() == found.model_dump()


def test_a_shared_base_is_not_changed_by_its_variants():
    found = config.loads(SMALL + '[[variants]]\nname = "a"\ndeployment.tp = 8\n')
    before = found.model_dump()
    found.variant_scenarios()
    assert found.model_dump() == before


def test_files_that_are_no_scenarios(tmp_path):
    with pytest.raises(ScenarioError, match="there is no scenario file"):
        config.load(tmp_path / "none.toml")
    (tmp_path / "there.yaml").write_text("")
    with pytest.raises(ScenarioError, match=r"did you mean .*there\.yaml\?"):
        config.load(tmp_path / "there.toml")
    with pytest.raises(ScenarioError, match="is a folder"):
        config.load(tmp_path)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ScenarioError, match="UTF-8"):
        config.load(tmp_path / "bytes.toml")
    (tmp_path / "x.ini").write_text("")
    with pytest.raises(ScenarioError, match=r"ends in \.toml, \.yaml or \.yml"):
        config.load(tmp_path / "x.ini")


def test_defaults_of_tables_are_those_of_empty_tables():
    """The defaults are not validated when the module is imported; as a part of a file they would be."""
    sections = ("engine", "scheduler", "predictor", "slo", "run")
    left_out = config.loads('workload = {preset = "chat-1m"}\ndeployment = {model = "opt-125m", gpu = "A100-80GB"}')
    for name in sections:
        default = getattr(left_out, name)
        assert default == type(default).model_validate({})
        assert default.model_dump() == type(default).model_validate({}).model_dump()


def test_absolute_paths_mean_the_same_in_another_folder(tmp_path, monkeypatch):
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    other.mkdir()
    (own / "requests.csv").write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,5,7\n1,6,8\n")
    (own / "profiles").mkdir()
    (own / "order.py").write_text("")
    text = "[workload]\ntrace = 'requests.csv'\n[deployment]\nmodel = 'llama-2-7b'\ngpu = 'A40'\n"
    text += "cost = 'vidur:profiles'\n[scheduler]\nrank = 'order.py:shortest'\n"
    (own / "one.toml").write_text(text)
    scenario = config.load(own / "one.toml")
    (other / "copy.toml").write_text(scenario.with_absolute_paths().to_toml())
    monkeypatch.chdir(other)
    copy = config.load(other / "copy.toml")
    assert copy.workload.trace == str(own / "requests.csv")
    assert (copy.deployment.model, copy.deployment.gpu) == ("llama-2-7b", "A40")
    assert copy.deployment.cost == f"vidur:{own / 'profiles'}"
    assert copy.scheduler.rank == f"{own / 'order.py'}:shortest"
    assert copy.files == sorted([other / "copy.toml", own / "order.py", own / "requests.csv"])


def test_an_engine_that_is_a_name_and_a_table_is_one_clear_error():
    text = 'engine = "sglang"\n[workload]\npreset = "chat-1m"\n[engine]\nmax_num_seqs = 8\n'
    with pytest.raises(ScenarioError, match=r'engine must be a name or a table; .* in the table: name = "sglang"$'):
        config.loads(text)


@pytest.mark.parametrize("bounds", ["[200, 0.5]", "200"])
def test_a_long_time_without_unit_in_a_list_is_noted(bounds):
    table = {"jct": {"p99": 900}, "ttft": {"p90": [200, 0.5] if bounds[0] == "[" else 200}}
    assert [note.partition(" = ")[0] for note in unit_notes(table)] == ["jct.p99", "ttft.p90"]
