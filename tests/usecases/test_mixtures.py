"""Scenarios and searches with groups of unlike replicas behind one router."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lengthwise import config, search
from lengthwise.metrics import by_group
from lengthwise.schema.errors import InputError
from lengthwise.schema.plan import Choice, Status, Study
from lengthwise.search.objectives import Task
from lengthwise.search.space import names_of
from lengthwise.usecases import capacity, explain, simulate
from lengthwise.usecases import search as search_module
from lengthwise.usecases.variants import build

EXAMPLE = (Path(__file__).parents[2] / "examples" / "mixed-replicas.toml").read_text()
FAST = ("run.model_draws=0", "search.precision=0.2", "search.seeds=1")


def loads(text=EXAMPLE, *overrides):
    return config.loads(text, overrides=[*FAST, *overrides])


def test_the_example_has_two_groups_with_their_own_settings():
    (variant,) = build(loads())
    first, second = variant.deployment.replica_groups
    assert (first.gpu.name, second.gpu.name) == ("H100", "L40S")
    assert (first.limits.max_num_seqs, second.limits.max_num_seqs) == (256, 64)
    assert second.node.name != first.node.name
    assert variant.deployment.gpus == 2


def test_a_simulation_reports_each_group():
    (outcome,) = simulate.run(loads())
    served = [len(own.requests.status) for own, _ in by_group(outcome.records, outcome.variant.deployment)]
    assert sum(served) == len(outcome.records.requests.status)
    assert served[0] > served[1] > 0
    notes = [note for note in outcome.notes if note.startswith("Group ")]
    assert len(notes) == 2
    assert "1 x H100 tp1" in notes[0]
    assert "cost model's error" in notes[1]
    hardware = outcome.summary.hardware
    assert len(hardware.replica_busy_share) == 2
    assert sum(share.value for share in hardware.time_shares.values()) == pytest.approx(1.0)
    assert 0 < hardware.mfu.value < 1


def test_groups_of_one_gpu_have_the_summary_of_equal_replicas():
    equal = EXAMPLE.replace('gpu = "L40S"\nreplicas = 1\nmax_num_seqs = 64', "replicas = 1")
    one = equal.replace("[[deployment.groups]]", "[x]").replace(
        "[x]           # simulate", "[[deployment.groups]] #", 1
    )
    one = one[: one.index("[x]")] + one[one.index("[scheduler]") :]
    one = one.replace("replicas = 1 ", "replicas = 2 ", 1)
    (a,), (b,) = simulate.run(loads(equal)), simulate.run(loads(one))
    assert a.variant.deployment.gpus == b.variant.deployment.gpus == 2
    assert a.summary.ttft_s.mean.value == b.summary.ttft_s.mean.value
    for name in ("busy_share", "mfu", "mbu", "kv_utilization", "power_w"):
        assert getattr(a.summary.hardware, name).value == pytest.approx(getattr(b.summary.hardware, name).value), name


def test_a_capacity_shows_the_bound_of_each_group():
    (found,) = capacity.capacities(loads())
    assert 0 < found.capacity.rate_rps.value <= found.capacity.ceiling.rate_rps
    (note,) = [note for note in found.notes if note.startswith("Bounds of the groups")]
    assert "1 x L40S tp1" in note
    assert "requests per dollar" in note


def test_explain_shows_each_group():
    shown = list(explain.by_group(build(loads())))
    assert [one.name for one in shown] == ["mixed-replicas, group 0", "mixed-replicas, group 1"]
    assert [explain.explain(one).deployment.gpu.name for one in shown] == ["H100", "L40S"]


WRONG = {
    "all groups behind one router serve the model": ('gpu = "L40S"', 'gpu = "L40S"\nmodel = "llama-3-8b"'),
    "there is no GPU named 'L50S'": ('gpu = "L40S"\nreplicas', 'gpu = "L50S"\nreplicas'),
    "replicas: must be at least 1": ("replicas = 1\nmax_num_seqs", "replicas = 0\nmax_num_seqs"),
    "each has its own replicas": ('gpu = "H100"\n', 'gpu = "H100"\nreplicas = 2\n'),
    "not modelled with a decode side": ('gpu = "H100"\n', 'gpu = "H100"\ndecode = { tp = 1 }\n'),
    "data-parallel ranks": ('gpu = "H100"\n', 'gpu = "H100"\ndp = 2\n'),
    "kv_offloading": ("[scheduler]", "[engine]\nenable_prefix_caching = true\nkv_offloading.size_gb = 64\n[scheduler]"),
    "takes all replicas to be alike": ("shortest_expected_delay", "vllm_internal"),
    "mixtures need a rate": ("cost_at_rate", "requests_per_dollar"),
    "mixtures need a budget": ("max_usd_per_hour = 7", ""),
    "of two GPU types": ('["H100", "L40S"]', '["H100"]'),
    "the budget has room for more mixtures": ("max_usd_per_hour = 7", "max_usd_per_hour = 200000"),
}


def use(text):
    requested = loads(text)
    simulate.run(requested)
    for one in search_module.questions(requested):
        one.candidates()


@pytest.mark.parametrize("message", WRONG)
def test_wrong_groups_and_mixtures_get_one_clear_error(message, monkeypatch):
    monkeypatch.setattr(search, "MAX_CANDIDATES", 500)
    text = EXAMPLE.replace(*WRONG[message], 1)
    assert text != EXAMPLE
    with pytest.raises(InputError, match=message):
        use(text)


def test_mixtures_without_prices_are_refused(tmp_path):
    gpus = (Path(__file__).parents[2] / "src/lengthwise/catalog/data/gpus.toml").read_text()
    table = gpus[gpus.index("[L40S]") :]
    table = table[: table.index("\n[", 1)]
    price = next(line for line in table.splitlines() if line.startswith("price_per_hour_usd"))
    free = tmp_path / "free.toml"
    free.write_text(table.replace("[L40S]", "[free]").replace(price, "price_per_hour_usd = 0.0"))
    text = EXAMPLE.replace('["H100", "L40S"]', f'["H100", "{free}"]')
    (one,) = search_module.questions(loads(text))
    with pytest.raises(InputError, match="compared by their prices"):
        one.candidates()
    free.write_text(table.replace("[L40S]", "[free]").replace(price, ""))
    (one,) = search_module.questions(loads(text))
    with pytest.raises(InputError, match=r"fewer that fit \(.*GPU free must give price_per_hour_usd"):
        one.candidates()


def test_the_axis_of_equal_replicas_excludes_groups():
    text = EXAMPLE.replace("mixtures = true", "").replace('gpu = ["H100", "L40S"]', "replicas = [1, 2]")
    with pytest.raises(InputError, match="the axis replicas is of equal replicas"):
        search_module.questions(loads(text))


def test_a_mistake_in_a_group_names_it_by_its_key():
    wrong = EXAMPLE.replace('gpu = "L40S"\nreplicas', 'gpu = "L50S"\nreplicas')
    with pytest.raises(InputError) as caught:
        build(loads(wrong))
    assert any(note.startswith("of deployment.groups.1") for note in caught.value.__notes__)


def test_a_mixture_has_launch_files(tmp_path, plans):
    study = Study("", (replace(plans[0], choices=tuple(c for c in plans[0].choices if search.GROUPS in c.settings)),))
    (place,) = search_module.write_launches(loads(EXAMPLE, "search.strategy=pruned"), study, tmp_path / "launch")
    assert {"vllm-group-0.sh", "vllm-group-1.sh", "gateway.toml", "router.sh"} <= {one.name for one in place.iterdir()}


def test_mixtures_are_all_numbers_of_two_gpus_within_the_budget():
    (one,) = search_module.questions(loads())
    budget, prices = 7.0, {"H100": 0.0, "L40S": 0.0}
    for gpu in prices:
        prices[gpu] = one.bench.build({"deployment.gpu": gpu}).price_per_hour_usd
    expected = {
        (a, b) for a in range(1, 99) for b in range(1, 99) if a * prices["H100"] + b * prices["L40S"] <= budget + 1e-9
    }
    mixed = [json.loads(made[search.GROUPS]) for made in one.candidates() if search.GROUPS in made]
    assert {(groups[0]["replicas"], groups[1]["replicas"]) for groups in mixed} == expected
    assert len(mixed) == len(expected) > 1
    assert [groups[1]["gpu"] for groups in mixed] == ["L40S"] * len(mixed)


@pytest.mark.parametrize(
    "axes", ['model = ["llama-3.1-8b", "qwen3-8b"]', "disaggregate = [false, true]\ndecode.replicas = [1]"]
)
def test_groups_of_a_mixture_have_one_model_and_no_decode_side(axes):
    (one,) = search_module.questions(loads(EXAMPLE + axes + "\n"))
    mixed = [made for made in one.candidates() if search.GROUPS in made]
    assert mixed
    for made in mixed:
        deployed = one.bench.build(made)
        assert deployed.decode is None
        assert len({group.model.name for group in deployed.replica_groups}) == 1


def test_a_search_says_when_its_router_ignores_speed():
    text = EXAMPLE.replace('router = "shortest_expected_delay"', 'router = "round_robin"')
    with search.threads(1) as workers:
        (found,) = search_module.plan(loads(text, "search.top=1"), workers).plans
    assert "round_robin ignores the speed" in " ".join(found.notes)


@pytest.fixture(scope="module")
def plans():
    with search.threads(1) as workers:
        return [
            search_module.plan(loads(EXAMPLE, f"search.strategy={name}", "search.top=1"), workers).plans[0]
            for name in ("pruned", "exhaustive")
        ]


def test_pruning_never_discards_the_cheapest(plans):
    pruned, exhaustive = plans
    assert {choice.key for choice in pruned.choices} == {choice.key for choice in exhaustive.choices}
    assert pruned.best.price_per_hour_usd == exhaustive.best.price_per_hour_usd
    cheapest = min(c.price_per_hour_usd for c in exhaustive.choices if c.status is Status.RANKED)
    assert pruned.best.price_per_hour_usd == cheapest


def test_the_plan_says_why_mixtures_win_or_lose(plans):
    (note,) = [note for note in plans[1].notes if note.startswith("Mixtures: ")]
    assert "requests per dollar" in note
    assert "lie between" in note


def test_a_mixture_repeats_as_a_scenario(plans):
    (one,) = search_module.questions(loads())
    mixed = next(choice for choice in plans[1].choices if search.GROUPS in choice.settings)
    made = search_module.scenario_of_choice(one, mixed)
    (variant,) = build(config.loads(made.to_toml()))
    assert variant.deployment.gpus == mixed.gpus
    assert variant.deployment.price_per_hour_usd == pytest.approx(mixed.price_per_hour_usd)


ROUTERS = '["shortest_expected_delay", "vllm_internal"]'


def test_mixtures_with_a_router_that_takes_replicas_to_be_alike_are_skipped_and_counted():
    text = EXAMPLE.replace('router = "shortest', '# router = "shortest') + f"router = {ROUTERS}\n"
    text = text.replace("max_usd_per_hour = 7", "max_usd_per_hour = 5")
    with search.threads(1) as workers:
        (found,) = search_module.plan(loads(text, "search.top=1"), workers).plans
    assert found.best is not None
    wrong = [c for c in found.choices if c.status is Status.REJECTED and "to be alike" in c.exclusion.reason]
    mixed = [c for c in found.choices if search.GROUPS in c.settings]
    assert wrong
    assert {c.settings["scheduler.router"] for c in wrong} == {"vllm_internal"}
    assert len(wrong) == sum(c.settings["scheduler.router"] == "vllm_internal" for c in mixed) == len(mixed) / 2
    (group,) = [one for one in found.excluded_groups if "to be alike" in one.example]
    assert group.count == len(wrong)


def test_kinds_of_replicas_that_cannot_be_built_leave_the_mixtures_of_the_others():
    (one,) = search_module.questions(loads(EXAMPLE + "tp = [1, 3]\n"))  # three GPUs cannot share the heads
    mixed = [made for made in one.candidates() if search.GROUPS in made]
    assert mixed
    assert not any('"tp": 3' in made[search.GROUPS] for made in mixed)


def test_equal_replicas_two_sides_and_mixtures_have_readable_names_in_one_search():
    (one,) = search_module.questions(loads(EXAMPLE + "disaggregate = [false, true]\n"))
    made = one.candidates()
    names = names_of(made)
    assert len(set(names)) == len(names)
    assert {"H100", "L40S", "H100 1P1D", "1xH100 + 1xL40S"} <= set(names)
    assert not any("=" in name or "deployment" in name for name in names)


def test_bounds_exclude_a_mixture_that_cannot_serve_the_rate():
    (one,) = search_module.questions(loads(EXAMPLE, "search.rate=400"))
    made = next(settings for settings in one.candidates() if search.GROUPS in settings)
    choice = one.bench(Task("bound", Choice("one", "", made, 0, 0.0, Status.PRUNED)))
    assert choice.status is Status.REJECTED
    assert "serves at most" in choice.exclusion.reason
