"""Files of applications: their content is what is planned and run, and errors in them are reported."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lengthwise import catalog
from lengthwise.apps.app import Call, Fan, From, LengthFields, Loop, Model, Sampling
from lengthwise.config.app_file import load_app, loads_app
from lengthwise.config.cluster import parse_node
from lengthwise.schema.deployment import EngineLimits
from lengthwise.schema.errors import InputError, ScenarioError, UnknownNameError
from lengthwise.workload import Empirical, Fixed, Uniform

COMPLETE = """
name = "whole"
[inputs]
file = "rows.jsonl"
id = "key"
[models."big-1.5"]
model = "llama-2-13b"
weights = "./weights"
revision = "abc"
lengths = { kind = "uniform", low = 3, high = 9 }
max_model_len = 2048
engine = { max_num_seqs = 64 }
[models.small]
model = "opt-125m"
lengths = { file = "seen.csv", column = "tokens", weights = "count" }
[models.third]
model = "opt-1.3b"
lengths = 12
[calls.draft]
model = "big-1.5"
prompt = "Write of {{ topic }}"
system = "Be brief."
max_tokens = 100
temperature = 0.5
top_p = 0.9
stop = ["END"]
seed = 3
extra = { min_p = 0.1 }
times = 2
known_tokens = "known"
[calls.judge]
model = ["small", "third"]
messages = [{ role = "user", content = "Which? {{ draft }}" }]
when = "draft"
when_share = 0.5
[calls.again]
model_from = "who"
prompt = "Again {{ previous.again }}"
[loops.round]
calls = ["again"]
max_rounds = 3
until = "'x' in again"
until_share = 0.25
[cluster]
nodes = ["4xA100-80GB", "2xH100@pairs"]
[run]
launcher = "static"
store = "ledger.sqlite"
command = "serve {weights} {port}"
environment = { A = "1" }
max_attempts = 5
lease = "2min"
[run.engines."big-1.5"]
urls = ["http://one:1", "http://two:2"]
environment = { B = "2" }
sleeps = true
[run.engines.small]
urls = ["http://three:3"]
command = ""
max_num_seqs = 7
[run.engines.third]
urls = ["http://three:4"]
"""


@pytest.fixture
def folder(tmp_path):
    row = {"key": "r", "topic": "tea", "known": 20, "owner": "small"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "seen.csv").write_text("tokens,count\n5,1\n7,3\n")
    (tmp_path / "weights").mkdir()
    return tmp_path


def test_everything_in_a_file_is_loaded(folder):
    (folder / "app.toml").write_text(COMPLETE)
    found = load_app(folder / "app.toml")
    big, small, third = found.app.models
    limits = EngineLimits(max_num_seqs=64, max_model_len=2048)
    assert big == Model("big-1.5", "llama-2-13b", "./weights", "abc", Uniform(3, 9), 2048, limits)
    assert small.lengths is not None
    assert small.lengths.quantile(np.array([0.2, 0.3, 0.9])).tolist() == [5, 7, 7]
    assert isinstance(small.lengths, Empirical)
    assert third.lengths == Fixed(12)
    sampling = Sampling(100, 0.5, 0.9, ("END",), 3, {"min_p": 0.1})
    assert found.app.calls == (
        Call(
            "draft",
            "big-1.5",
            "Write of {{ topic }}",
            system="Be brief.",
            sampling=sampling,
            fan=Fan(times=2),
            report=LengthFields(output_tokens="known"),
        ),
        Call("judge", ("small", "third"), (("user", "Which? {{ draft }}"),), when="draft", when_share=0.5),
        Call("again", From("who"), "Again {{ previous.again }}"),
    )
    assert found.app.loops == (Loop("round", ("again",), 3, "'x' in again", 0.25),)
    assert list(found.rows.ids) == ["r"]
    assert [one.name for one in found.served] == ["big-1.5", "small", "third"]
    assert found.served[0].limits == limits
    assert set(found.files) == {folder / name for name in ("app.toml", "rows.jsonl", "seen.csv")}


def test_a_run_is_configured_as_in_the_file(folder):
    found = loads_app(COMPLETE, folder=folder)
    big, small, _ = found.loaded
    assert big.weights == str(folder / "weights")
    assert (big.command, dict(big.environment), big.max_num_seqs, big.sleeps) == (
        "serve {weights} {port}",
        {"A": "1", "B": "2"},
        256,
        True,
    )
    assert (small.command, dict(small.environment), small.max_num_seqs, small.sleeps) == ("", {"A": "1"}, 7, False)
    assert big.max_model_len == 2048
    assert found.run.launcher == "static"
    assert found.run.urls == {0: ("http://one:1", "http://two:2"), 1: ("http://three:3",), 2: ("http://three:4",)}
    assert found.run.settings.max_attempts == 5
    assert found.run.settings.lease_s == 120.0
    assert found.run.store == str(folder / "ledger.sqlite")
    assert found.cluster is not None
    assert [(m.gpu.name, m.gpus, m.node.link_group) for m in found.cluster.machines] == [
        ("A100-80GB", 4, 4 if catalog.default_node(catalog.gpu("A100-80GB"), 4).link_group == 4 else 8),
        (catalog.gpu("H100").name, 2, 2),
    ]


def test_what_is_set_wins(folder):
    overrides = ["models.small.weights=./weights", "cluster.nodes=['1xA40']", "run.store=postgresql://u@h/d"]
    found = loads_app(COMPLETE, folder=folder, overrides=overrides)
    assert found.loaded[1].weights == str(folder / "weights")
    assert found.cluster is not None
    assert found.cluster.gpus == 1
    assert found.run.store == "postgresql://u@h/d"


def test_yaml_is_equivalent(folder):
    import tomllib

    import yaml

    written = yaml.safe_dump(tomllib.loads(COMPLETE), sort_keys=False)
    one, other = loads_app(COMPLETE, folder=folder), loads_app(written, suffix=".yaml", folder=folder)
    assert one.app.calls == other.app.calls
    assert one.app.loops == other.app.loops
    assert one.run == other.run
    assert one.cluster == other.cluster


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["calls.draft.modle=x"], "--set calls.draft.modle: there is no such key; did you mean model?"),
        (["calls.draft.model=smal"], "there is no model for call 'draft' named 'smal'. Did you mean: small?"),
        (["calls.draft.max_tokens=0"], "calls.draft.max_tokens: must be at least 1"),
        (["calls.draft.prompt='{{ topic'"], "a template must be one of Jinja2"),
        (["calls.draft.model_from=who"], "calls.draft: give one of: model, model_from"),
        (["calls.draft.over=chunks"], "calls.draft: a call fans out in one way"),
        (["models.small.lengths=null", "models.small.modell=x"], "models.small.modell: there is no such key"),
        (["models.small.model=opt-125n"], "models.small.model: there is no model named 'opt-125n'. Did you mean"),
        (["models.small.cost=magic"], "models.small.cost: there is no source of costs named 'magic'"),
        (["models.third.lengths={kind='uniform', low=5}"], "models.third.lengths.high: is missing"),
        (["models.third.lengths={kind='nope'}"], "models.third.lengths: kind must be one of"),
        (["models.third.lengths={low=5}"], "models.third.lengths: must have a kind"),
        (["models.small.lengths.column=token"], "there is no column in"),
        (["inputs.file=none.jsonl"], "inputs: there is no file of inputs"),
        (["inputs.id=kee"], "line 1: there is no field for the id named 'kee'. Did you mean: key?"),
        (["inputs.openai_batch=b.jsonl"], "inputs: give one of: file, openai_batch"),
        (["cluster.nodes=['8xA100-81GB']"], "cluster.nodes: there is no GPU named 'A100-81GB'"),
        (["run.engines.smol.max_num_seqs=3"], "run.engines.smol: there is no model named 'smol'. Did you mean: small?"),
        (["run.command=serve {prot}"], "run.engines.big-1.5: there is no placeholder in the command of big-1.5"),
        (["run.launcher=cloud"], "run.launcher: must be 'local', 'ray', 'static' or 'simulated'"),
        (["run.engines.small.urls=[]"], "small has none"),
        (["run.lease=never"], "run.lease: must be seconds"),
        (["loops.round.max_rounds=0"], "loops.round.max_rounds: must be at least 1"),
        (["nmae=x"], "nmae: there is no such key; did you mean name?"),
    ],
)
def test_a_problem_is_reported_by_its_key(folder, overrides, message):
    with pytest.raises(ScenarioError) as error:
        loads_app(COMPLETE, folder=folder, overrides=overrides)
    assert message in str(error.value)


def test_all_problems_are_reported_at_once(folder):
    overrides = ["calls.draft.seed=x", "models.third.cost=y", "cluster.nodes=['z']"]
    with pytest.raises(ScenarioError, match="3 problems"):
        loads_app(COMPLETE, folder=folder, overrides=overrides)


def test_a_batch_is_an_application(folder):
    body = {"model": "opt-125m", "prompt": "Hi", "max_tokens": 4}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (folder / "batch.jsonl").write_text(json.dumps(line) + "\n")
    text = '[inputs]\nopenai_batch = "batch.jsonl"\n'
    found = loads_app(text, folder=folder)
    assert found.is_batch
    assert [one.name for one in found.app.models] == ["opt-125m"]
    assert [one.model for one in found.served] == ["opt-125m"]
    assert found.rows.ids == ["a"]
    assert found.notes
    with pytest.raises(ScenarioError, match="calls: the requests of a batch are its calls"):
        loads_app(text, folder=folder, overrides=["calls.x.prompt=y"])


@pytest.mark.parametrize(
    ("text", "gpu", "gpus", "group"),
    [
        ("8xA100-80GB", "A100-80GB", 8, 8),
        ("8xA100-80GB@pairs", "A100-80GB", 8, 2),
        ("2 x A100-80GB @ a100-pairwise-nvlink", "A100-80GB", 2, 2),
        ("dgx-h200", catalog.gpu("H200").name, 8, 8),
    ],
)
def test_nodes_are_read_as_people_write_them(text, gpu, gpus, group):
    found = parse_node(text)
    assert (found.gpu.name, found.gpus, found.node.link_group) == (gpu, gpus, group)
    assert found.node.gpus >= gpus


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dgx-a100", "does not say which GPUs it has; write 8xA100"),
        ("0xA100-80GB", "one of the catalog; it is '0xA100-80GB'"),
        ("9xA100-80GB", "at most 8 GPUs, not 9"),
        ("8xL4@pairs", "joins L4 in pairs; a100-pairwise-nvlink"),
        ("dgx-h20O", "there is no node named 'dgx-h20O'. Did you mean"),
        ("2xA100-80GB@dgx-a10", "Did you mean: dgx-a100"),
    ],
)
def test_unknown_nodes_are_reported(text, message):
    with pytest.raises((InputError, UnknownNameError)) as error:
        parse_node(text)
    assert message in str(error.value)
