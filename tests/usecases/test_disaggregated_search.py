"""Searches, capacities, explanations and launch files of deployments whose prefill and decode replicas are separate."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import yaml

from lengthwise import catalog, config, engine, search
from lengthwise.cost.model_error import comparable_deployments
from lengthwise.schema.errors import InputError
from lengthwise.schema.plan import Choice, Status
from lengthwise.search.load import Load
from lengthwise.search.measurement import simulated_window
from lengthwise.search.objectives import Task
from lengthwise.search.space import names_of
from lengthwise.usecases import capacity, explain
from lengthwise.usecases import search as search_module
from lengthwise.usecases.variants import build

TEXT = """
name = "small"
[workload]
isl = { kind = "uniform", low = 200, high = 2000 }
osl = { kind = "uniform", low = 20, high = 200 }
request_rate = 4
[deployment]
model = "llama-3-8b"
gpu = "H100"
[engine]
max_model_len = 4096
[run]
model_draws = 10
[search]
max_gpus = 4
seeds = 2
precision = 0.2
top = 3
sensitivity = false
[search.limits]
ttft.p90 = "500ms"
tpot.p90 = "20ms"
[search.space]
disaggregate = [false, true]
replicas = "fill"
decode.replicas = "fill"
"""
COUNTS = ("deployment.replicas", "deployment.decode.replicas")


def requested(text=TEXT, *overrides):
    (one,) = search_module.questions(config.loads(text, overrides=overrides))
    return one


def counts(text=TEXT, *overrides):
    """The numbers of prefill and decode replicas; of equal replicas, theirs and None."""
    return sorted(
        (tuple(one.get(key) for key in COUNTS) for one in requested(text, *overrides).candidates()),
        key=lambda pair: (pair[1] is not None, pair),
    )


def test_fill_is_each_split_without_room_for_another_replica():
    assert counts() == [(4, None), (1, 3), (2, 2), (3, 1)]
    assert counts(TEXT, "search.space.decode.tp=[2]") == [(4, None), (2, 1)]
    assert counts(TEXT, "search.max_gpus=5", "search.space.decode.tp=[2]") == [(5, None), (1, 2), (3, 1)]


def test_decode_replicas_on_another_gpu_are_configurations_with_names_and_prices():
    """Equal replicas have no decode GPU and are one configuration."""
    space = TEXT.replace('decode.replicas = "fill"\n', 'decode.replicas = [1]\ndecode.gpu = ["H100", "H200"]\n')
    space = space.replace('replicas = "fill"', "replicas = [1]", 1)
    one = requested(space)
    found = list(one.candidates())
    assert len(found) == 3
    names = names_of(found)
    assert sorted(names) == ["1P1D", "decode H200 1P1D", "equal replicas"]
    prices = {}
    for name, settings in zip(names, found, strict=True):
        task = Task("bound", Choice("one", name, settings, 0, 0.0, Status.PRUNED))
        bounded = one.bench(task)
        assert bounded.status is Status.PRUNED
        prices[name] = bounded.price_per_hour_usd
    h100, h200 = (catalog.gpu(name).price_per_hour_usd for name in ("H100", "H200"))
    assert prices == pytest.approx({"equal replicas": h100, "1P1D": 2 * h100, "decode H200 1P1D": h100 + h200})


def test_a_launch_that_fails_leaves_the_earlier_folders(study, tmp_path, monkeypatch):
    (plan,) = study.plans
    only = replace(study, plans=(replace(plan, choices=tuple(c for c in plan.choices if c.name == "2P2D")),))
    (folder,) = search_module.write_launches(config.loads(TEXT), only, tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    scenario = search_module.scenario_of_choice

    def failing(requested, choice):
        if choice.name != "2P2D":
            raise InputError("no such choice")
        return scenario(requested, choice)

    monkeypatch.setattr(search_module, "scenario_of_choice", failing)
    with pytest.raises(InputError, match="no such choice"):
        search_module.write_launches(config.loads(TEXT), study, tmp_path, top=4, force=True)
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_numbers_are_as_given_and_those_of_the_scenario_otherwise():
    text = TEXT.replace('replicas = "fill"\ndecode.replicas = "fill"\n', "%s")
    assert counts(text % "replicas = [1, 2]\ndecode.replicas = [1, 4]\n") == [
        (1, None), (2, None), (1, 1), (1, 4), (2, 1), (2, 4),
    ]  # fmt: skip
    assert counts(text % "decode.tp = [1, 2]\n", "deployment.replicas=2", "deployment.decode.replicas=1") == [
        (2, None), (2, 1), (2, 1),
    ]  # fmt: skip
    assert counts(text % 'replicas = "fill"\ndecode.replicas = [2]\n') == [(4, None), (2, 2)]


def test_fill_counts_the_gpus_of_all_data_parallel_ranks():
    found = requested(TEXT, "search.max_gpus=8", "search.space.dp=[1, 4]", "search.space.tp=[2]").candidates()
    alone = {one["deployment.dp"]: one[COUNTS[0]] for one in found if not one["deployment.disaggregate"]}
    assert alone == {1: 4, 4: 1}
    wide = requested(TEXT, "search.max_gpus=8", "search.space.decode.dp=[4]").candidates()
    assert {(one[COUNTS[0]], one[COUNTS[1]]) for one in wide if one["deployment.disaggregate"]} == {(4, 1)}
    assert "decode dp4" in names_of([*wide, {**wide[-1], "deployment.decode.dp": 2}])[len(wide) - 1]


def test_one_search_ranks_data_parallel_ranks_and_separate_replicas():
    """Ranks are on both sides, unless the decode side has a number of its own."""
    space = """
    [[search.any_of]]
    dp = 4
    tp = 1
    ep = 4
    disaggregate = [true, false]
    [[search.any_of]]
    dp = 1
    ep = 1
    tp = 2
    disaggregate = true
    decode.replicas = 1
    """
    text = TEXT[: TEXT.index("[search.space]")].replace("llama-3-8b", "gpt-oss-20b") + space
    one = requested(text, "search.max_gpus=8")
    found = {}
    for settings in one.candidates():
        task = Task("bound", Choice("one", "", settings, 0, 0.0, Status.PRUNED))
        found[settings["deployment.dp"], settings["deployment.disaggregate"]] = one.bench(task)
    for choice in found.values():
        assert choice.status is Status.PRUNED
    assert {key: choice.gpus for key, choice in found.items()} == {(4, False): 4, (4, True): 8, (1, True): 4}


def test_a_search_at_a_rate_tries_all_numbers_up_to_the_budget():
    text = TEXT.replace('replicas = "fill"\ndecode.replicas = "fill"\n', "").replace(
        "[search]\n", '[search]\nobjective = "fewest_gpus"\n'
    )
    assert counts(text) == [(None, None), (1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1)]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("search.max_gpus=1", "search.space.disaggregate=[true]"), "search.max_gpus must be at least 2, for one pref"),
        (("search.space.disaggregate=[false]",), "the axis decode.replicas is of decode replicas, and no config"),
        (("search.max_gpus=null",), "fills search.max_gpus, which is not set"),
        (("search.space.decode.replicas=[0]",), r"decode.replicas.*at least 1|greater than or equal to 1"),
        (("search.space.decode.gpus=[4]",), "is no setting that a search can vary"),
        (('search.space.decode.replicas="auto"',), "is for the objectives cost_at_rate and fewest_gpus"),
    ],
)
def test_a_space_that_has_no_such_configuration_is_refused(overrides, message):
    with pytest.raises(InputError, match=message):
        counts(TEXT, *overrides)


def test_a_strategy_is_refused_settings_of_decodes_without_effect():
    space = TEXT.replace("[search]\n", '[search]\nstrategy = "bayesian"\n')
    with search.threads(1) as workers, pytest.raises(InputError, match=r"two \[\[search.any_of\]\] tables"):
        search_module.plan(config.loads(space), workers)
    requested(space, "search.space.disaggregate=[true]").require_own_decode_axes()


def test_a_side_that_does_not_fit_beside_equal_replicas_is_rejected_with_the_numbers():
    with search.threads(1) as workers:
        (plan,) = search_module.plan(config.loads(TEXT, overrides=["search.max_gpus=1"]), workers).plans
    (one,) = [c for c in plan.choices if c.status is Status.REJECTED]
    assert one.exclusion.reason == "tp x pp x replicas of both sides, 1 + 1, are 2 GPUs; search.max_gpus is 1"


@pytest.fixture(scope="module")
def study():
    with search.threads(2) as workers:
        return search_module.plan(config.loads(TEXT), workers)


def test_one_ranking_has_equal_and_separate_replicas(study):
    (plan,) = study.plans
    assert {choice.name for choice in plan.choices} == {"x4", "1P3D", "2P2D", "3P1D"}
    ranked = [choice for choice in plan.choices if choice.status is Status.RANKED]
    assert len(ranked) >= 3
    for choice in ranked:
        assert choice.gpus == 4
        assert choice.objective.has_interval
        assert choice.objective.has_model_interval
        assert choice.objective.value <= choice.bounds.objective * (1 + 1e-9)
    assert any(re.match(r"disaggregate = (true|false): the best configuration with", line) for line in plan.reasons)
    assert any("decode replicas" in c.bottleneck.cause for c in ranked if "D" in c.name)


def test_a_choice_repeats_as_a_scenario(study):
    (plan,) = study.plans
    choice = next(c for c in plan.choices if c.name == "2P2D")
    made = search_module.scenario_of_choice(requested(), choice)
    again = config.loads(made.to_toml())
    (variant,) = build(again)
    assert (variant.deployment.parallel.replicas, variant.deployment.decode.parallel.replicas) == (2, 2)
    equal = next(c for c in plan.choices if c.name == "x4")
    (variant,) = build(search_module.scenario_of_choice(requested(), equal))
    assert variant.deployment.decode is None
    assert variant.deployment.gpus == 4


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ('search.space.decode.gpu=["H200", "L40S", "H100"]', "search.max_gpus=3")])
def test_pruning_loses_nothing_that_an_exhaustive_search_finds(more):
    text = TEXT.replace("top = 3", "top = 1").replace("max_gpus = 4", "max_gpus = 6")
    with search.threads(2) as workers:
        pruned, full = (
            search_module.plan(
                config.loads(text, overrides=[f"search.strategy={name}", "run.model_draws=0", *more]), workers
            )
            for name in ("pruned", "exhaustive")
        )
    (a,), (b,) = pruned.plans, full.plans
    assert a.best.objective.value >= b.best.objective.value * (1 - 0.25)
    assert {c.key for c in a.choices} == {c.key for c in b.choices}
    bounds = {c.key: c.bounds.objective for c in a.choices}
    for choice in b.choices:
        if choice.status is Status.RANKED:
            assert choice.objective.value <= bounds[choice.key] * (1 + 1e-9)
    assert bounds[b.best.key] >= a.best.objective.value * (1 - 1e-9), "the best is not excluded by its bound"


def test_at_a_rate_bounds_exclude_splits_whose_side_cannot_serve_it():
    text = TEXT.replace('replicas = "fill"\ndecode.replicas = "fill"\n', "").replace(
        "model_draws = 10", "model_draws = 0"
    )
    text = text.replace("[search]\n", '[search]\nobjective = "fewest_gpus"\nrate = 90\n').replace(
        "= 4\nseeds", "= 8\nseeds"
    )
    with search.threads(1) as workers:
        (plan,) = search_module.plan(config.loads(text, overrides=["search.space.disaggregate=[true]"]), workers).plans
    excluded = {c.name for c in plan.choices if c.exclusion.group == "cannot serve the rate"}
    assert {"1P1D", "1P2D", "1P7D"} <= excluded
    assert plan.best is not None
    assert plan.best.name not in excluded
    for choice in plan.choices:
        if choice.name in excluded:
            assert choice.simulations == 0
            assert choice.exclusion.reason.endswith("requests/s; the rate is 90")


def test_the_side_that_binds_is_named():
    text = TEXT[: TEXT.index("[search]")]
    for replicas, binds in ((("1", "4"), "prefill side"), (("4", "1"), "decode side")):
        own = [f"deployment.replicas={replicas[0]}", f"deployment.decode.replicas={replicas[1]}"]
        (variant,) = build(config.loads(text, overrides=own))
        found = explain.explain(variant)
        assert found.sides.binds == binds
        assert found.deployment.gpus == 5
        assert [step.name.split()[0] for step in found.steps] == ["prompt"]
        assert {step.name.split()[0] for step in found.sides.decode.steps} == {"decode"}
        # With the balanced number of decode replicas for each prefill replica, both bounds are equal.
        rates = found.sides.rates_rps
        per = rates["prefill side"] / int(replicas[0]), rates["decode side"] / int(replicas[1])
        assert found.sides.decodes_per_prefill == pytest.approx(per[0] / per[1])


@pytest.mark.parametrize("lengths", [(64, 8), (2000, 20), (500, 400)])
def test_the_balance_does_not_depend_on_the_replicas(lengths):
    """A side carries the same with few and with many replicas of the other side."""
    text = TEXT[: TEXT.index("[search]")]
    fixed = [
        f'workload.{key}={{ kind = "fixed", tokens = {n} }}' for key, n in zip(("isl", "osl"), lengths, strict=True)
    ]
    found = {}
    for numbers in ((1, 1), (8, 1), (1, 8), (3, 5)):
        own = [f"{key}={number}" for key, number in zip(COUNTS, numbers, strict=True)]
        (variant,) = build(config.loads(text, overrides=[*fixed, *own]))
        found[numbers] = explain.explain(variant).sides
    ratios = [sides.decodes_per_prefill for sides in found.values()]
    assert ratios == pytest.approx([ratios[0]] * len(ratios))
    for name in ("prefill side", "decode side"):
        of = ("prefill side", "decode side").index(name)
        each = [sides.rates_rps[name] / numbers[of] for numbers, sides in found.items()]
        assert each == pytest.approx([each[0]] * len(each))


def test_capacity_names_the_bounds_of_both_sides():
    text = TEXT[: TEXT.index("[search.space]")]
    own = ["deployment.decode.replicas=1", "run.model_draws=0"]
    (found,) = capacity.capacities(config.loads(text, overrides=own))
    value = found.capacity.rate_rps.value
    parts = found.capacity.ceiling.parts
    assert 0 < value <= found.capacity.ceiling.rate_rps
    assert set(parts) == {"prefill side", "KV transfer", "decode side"}
    least = min(parts, key=parts.get)
    assert any(note.startswith("1P1D: ") and f"The {least} has the smallest." in note for note in found.notes)
    assert f'"{least}"' in capacity.capacities_json([found])


def test_model_errors_cover_both_sides_and_are_those_of_equal_replicas():
    (split,) = build(config.loads(TEXT, overrides=["deployment.disaggregate=true"]))
    equal = replace(split.deployment, decode=None)
    for one, other in zip(
        comparable_deployments(split.deployment, 4)[1:], comparable_deployments(equal, 4)[1:], strict=True
    ):
        np.testing.assert_array_equal(one.cost.layer_s, other.cost.layer_s)
        factor = (other.cost.layer_s[1:] / equal.cost.layer_s[1:]).mean()
        np.testing.assert_allclose(one.decode.cost.layer_s, factor * split.deployment.decode.cost.layer_s)
        assert abs(factor - 1) > 1e-6


def test_a_decode_side_that_falls_behind_is_a_growing_queue():
    """Long before the memory of the prefill side is full, when the queue in front of it would grow."""
    text = TEXT[: TEXT.index("[search]")] + "[deployment.decode]\nmax_num_seqs = 4\n"
    (variant,) = build(config.loads(text, overrides=["workload.num_requests=800"]))
    load = Load(search_module.search_load(variant.scenario).draw)
    top = search.ceiling(variant.deployment, load.sample()).parts
    assert top["decode side"] < top["prefill side"] / 2
    window = simulated_window(load.at(0, 800, 1.3 * top["decode side"]), variant.deployment, 0, sums=False)
    r = window.records.requests
    assert (r.scheduled_s[r.arrival_s < 0.95 * window.end_s] < window.end_s).all(), "no request waits to be prefilled"
    assert window.queue_growth() > 0.1
    slow = simulated_window(load.at(0, 800, 0.5 * top["decode side"]), variant.deployment, 0, sums=False)
    assert slow.queue_growth() < 0.02


def test_the_launch_folder_of_separate_sides(study, tmp_path):
    (plan,) = study.plans
    only = replace(plan, choices=tuple(c for c in plan.choices if c.name == "2P2D"))
    (folder,) = search_module.write_launches(config.loads(TEXT), replace(study, plans=(only,)), tmp_path)
    names = {path.name for path in folder.iterdir()}
    assert {f"{e}-{part}.sh" for e in ("vllm", "sglang") for part in ("prefill", "decode", "router")} <= names
    assert not {"vllm.sh", "sglang.sh", "router.sh"} & names
    text = (folder / "README.md").read_text()
    for side in ("Prefill", "Decode"):
        assert f"- {side} side: 2 x (tp 1, pp 1), on 2 x H100 (dgx-h100)\n" in text
    first = text.split("\n\n")[1]
    assert first.startswith("This was simulated, not measured")
    assert len(first.split()) < 40
    assert "those of SGLang and kubernetes.yaml never ran" in text
    assert text.count("needs NIXL") == 2, "once for each engine"
    kinds = [one["kind"] for one in yaml.safe_load_all((folder / "kubernetes.yaml").read_text())]
    assert kinds.count("StatefulSet") == 2
    (variant,) = build(config.load(folder / "scenario.toml"))
    assert engine.simulate(variant.workload(0), variant.deployment).requests.finished_s.size
    # An earlier search's folders are replaced as those of equal replicas are.
    assert search_module.write_launches(config.loads(TEXT), replace(study, plans=(only,)), tmp_path, force=True) == [
        folder
    ]
