"""A file of cost tables stands for the one deployment it was made for: simulate, capacity and search ask."""

from __future__ import annotations

import pytest

from lengthwise import config, cost
from lengthwise.cli import main
from lengthwise.schema.errors import InputError, ProfileError
from lengthwise.usecases import search
from lengthwise.usecases.variants import deployment

REQUESTED = """
[workload]
isl = { kind = "uniform", low = 100, high = 300 }
osl = { kind = "uniform", low = 20, high = 60 }
request_rate = 2
num_requests = 30
[deployment]
model = "llama-3-8b"
gpu = "H100"
cost = "tables:c.npz"
[search]
seeds = 2
precision = 0.2
[search.space]
tp = [1]
[search.limits]
"ttft.p50" = "1s"
"""
OTHERS = {
    "tp": (("deployment.tp=2",), "tp 1, not 2"),
    "gpu": (("deployment.gpu=A100-80GB",), "the GPU H100, not A100-80GB"),
    "model": (("deployment.model=mistral-7b",), "the model llama-3-8b, not mistral-7b"),
    "both": (("deployment.tp=2", "deployment.gpu=A100-80GB"), "tp 1, not 2"),
}


@pytest.fixture(params=[True, False], ids=["report", "older"])
def tables(request, tmp_path):
    """A scenario's file beside tables of it, and whether they keep what they are of."""
    path = tmp_path / "mine.toml"
    path.write_text(REQUESTED, "utf-8")
    made = deployment(config.loads(REQUESTED, overrides=["deployment.cost=roofline"]))
    cost.save(made.cost, tmp_path / "c.npz", cost.MadeFor.of_deployment(made) if request.param else None)
    return path, request.param


@pytest.mark.parametrize("command", ["simulate", "capacity"])
@pytest.mark.parametrize("other", OTHERS)
def test_another_deployment_is_refused(command, other, tables, capsys):
    (path, reported), (changes, words) = tables, OTHERS[other]
    changed = [word for change in changes for word in ("--set", change)]
    finished = main([command, str(path), *changed])
    message = " ".join("".join(capsys.readouterr()).split())
    if reported:
        assert finished != 0
        assert words in message
    elif other != "model":
        assert finished == 0
        assert "do not record their model and GPU" in message


@pytest.mark.parametrize("command", ["simulate", "capacity"])
def test_its_own_deployment_takes_it_and_older_files_are_noted(command, tables, capsys):
    path, reported = tables
    assert main([command, str(path)]) == 0
    message = " ".join(capsys.readouterr().out.split())
    assert ("made for llama-3-8b on H100 with tp 1" in message) is not reported


def test_a_decode_side_of_another_degree_is_refused(tables):
    path, reported = tables
    requested = config.load(path, ["deployment.decode.tp=2"])
    if reported:
        with pytest.raises(ProfileError, match="tp 1, not 2"):
            deployment(requested)
    else:
        deployment(requested)


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"tp": "[1, 2]"}, "tp 1, 2"),
        ({"tp": "[1]", "gpu": '["H100", "A100-80GB"]'}, "gpu H100, A100-80GB"),
        ({"tp": "[1, 2]", "gpu": '["H100", "A100-80GB"]'}, "gpu H100, A100-80GB; tp 1, 2"),
        ({"model": '["llama-3-8b", "mistral-7b"]'}, "model llama-3-8b, mistral-7b"),
        ({"weight_dtype": '["bf16", "fp8"]'}, "weight_dtype"),
    ],
)
def test_a_search_that_would_make_all_alike_is_refused(axes, words, tables):
    path, _ = tables
    requested = config.load(path, [f"search.space={{ {', '.join(f'{k} = {v}' for k, v in axes.items())} }}"])
    with pytest.raises(InputError, match="would make all alike") as reported:
        search.questions(requested)
    assert words in str(reported.value)


@pytest.mark.slow
def test_a_search_over_knobs_takes_tables_of_its_own_deployment(tables, capsys):
    path, reported = tables
    assert main(["search", str(path), "--set", "search.space={ max_num_seqs = [16, 64] }"]) == 0
    message = " ".join(capsys.readouterr().out.split())
    assert ("It is assumed" in message) is not reported


def test_a_file_for_each_alternative_is_taken(tables, tmp_path):
    path, _ = tables
    two = deployment(config.loads(REQUESTED, overrides=["deployment.cost=roofline", "deployment.tp=2"]))
    cost.save(two.cost, tmp_path / "two.npz", cost.MadeFor.of_deployment(two))
    text = path.read_text("utf-8").replace("[search.space]\ntp = [1]\n", "")
    for tp, name in ((1, "c"), (2, "two")):
        text += f'[[search.any_of]]\ntp = {tp}\ncost = "tables:{name}.npz"\n'
    path.write_text(text, "utf-8")
    (requested,) = search.questions(config.load(path))
    for tp, name in ((1, "c"), (2, "two")):
        settings = {"deployment.tp": tp, "deployment.cost": f"tables:{name}.npz"}
        assert requested.bench.build(settings).parallel.tp == tp
