"""Bayesian search: better than chance, never the same twice, and the same for the same seed."""

from __future__ import annotations

import logging
import math
import random
import sys
from itertools import product

import pytest

from lengthwise.schema.errors import InputError, MissingExtraError
from lengthwise.search.strategy import Bayesian

pytest.importorskip("optuna")

MEMORY = {"L4": 24, "A100": 80, "H100": 80, "H200": 141}
SPEED = {"L4": 1.0, "A100": 3.2, "H100": 6.1, "H200": 6.9}
PRICE = {"L4": 0.8, "A100": 2.1, "H100": 3.9, "H200": 4.6}
SHARED = {
    "gpu": tuple(MEMORY),
    "tp": (1, 2, 4, 8),
    "pp": (1, 2, 4),
    "max_num_seqs": (8, 16, 32, 64, 128, 256, 512, 1024),
}
AXES = [
    {"scheduler": ("sarathi",), **SHARED, "chunk": (128, 256, 512, 1024, 2048, 4096)},
    {"scheduler": ("vllm",), **SHARED, "watermark": (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3)},
]
SMALL = [{"kind": ("a",), "n": (1, 2, 3)}, {"kind": ("b",), "n": (1, 2, 3), "flag": (True, None)}]


def toy_score(settings):
    """Tokens a dollar, roughly: memory bounds the batch, links eat some of every doubling."""
    gpu, seqs = settings["gpu"], settings["max_num_seqs"]
    devices = settings["tp"] * settings["pp"]
    room = (MEMORY[gpu] * devices * 0.9 - 140) * 1.6
    if room <= 0:
        return None
    batch = min(seqs, room)
    links = (1 - 0.06 * math.log2(settings["tp"])) * (1 - 0.09 * math.log2(settings["pp"]))
    rate = SPEED[gpu] * batch / (batch + 20 * SPEED[gpu]) * links
    if seqs > room:
        rate *= 1 - 0.15 * min(1, math.log2(seqs / room) / 3)
    if settings["scheduler"] == "sarathi":
        return rate * (1.08 - 0.03 * abs(math.log2(settings["chunk"] / 1024))) / PRICE[gpu]
    return rate * (1 - 2 * (settings["watermark"] - 0.05) ** 2) / PRICE[gpu]


def points(axes):
    return [dict(zip(side, values, strict=True)) for side in axes for values in product(*side.values())]


def waves(strategy, score):
    """All waves of a search, reported in another order than they were suggested."""
    sent = []
    while wave := strategy.suggest():
        sent.append(wave)
        strategy.report([(settings, score(settings)) for settings in reversed(wave)])
    return sent


def flat(requested):
    return [settings for wave in requested for settings in wave]


def names(settings):
    return [repr(sorted(point.items())) for point in settings]


@pytest.mark.slow
def test_150_trials_of_5000_come_within_2_percent_and_beat_chance():
    everything = [toy_score(settings) for settings in points(AXES)]
    assert 4_900 < len(everything) < 5_100
    best = max(score for score in everything if score is not None)
    found = [reached(map(toy_score, flat(waves(Bayesian(AXES, 150, seed), toy_score)))) for seed in range(5)]
    drawn = [reached(random.Random(seed).sample(everything, 150)) for seed in range(200)]
    assert sum(score >= 0.98 * best for score in found) >= 4
    assert sum(found) / len(found) > sum(drawn) / len(drawn)


def reached(scores):
    return max(score for score in scores if score is not None)


def test_a_few_trials_learn_what_is_infeasible_and_what_is_good():
    """The later half of 60 trials is better than chance: the estimator uses what is reported to it."""
    axes = [{"x": tuple(range(200)), "side": ("left", "right")}]

    def score(settings):
        return None if settings["side"] == "left" else -abs(settings["x"] - 155)

    later = [s for seed in range(3) for s in flat(waves(Bayesian(axes, 60, seed, batch_size=4), score))[30:]]
    assert len(later) == 90
    assert sum(settings["side"] == "right" for settings in later) > 54  # chance: 45
    assert sum(abs(settings["x"] - 155) <= 20 for settings in later) > 27  # chance: 18


def test_a_small_space_is_proposed_completely_and_nothing_twice():
    sent = waves(Bayesian(SMALL, 100, seed=3, batch_size=4), lambda settings: settings["n"])
    assert [len(wave) for wave in sent] == [4, 4, 1]
    assert sorted(names(flat(sent))) == sorted(names(points(SMALL)))


def test_a_wave_with_pending_results_is_not_proposed_again():
    strategy = Bayesian(SMALL, 100, seed=3, batch_size=4)
    sent = [*strategy.suggest(), *strategy.suggest(), *strategy.suggest()]
    assert len(set(names(sent))) == len(sent) == 9
    strategy.report([(settings, None) for settings in sent])
    assert strategy.suggest() == []


def test_alternatives_that_meet_are_tried_once():
    axes = [{"n": (1, 2, 2)}, {"n": (2, 3)}]
    assert sorted(names(flat(waves(Bayesian(axes, 9, seed=0), lambda _: 1.0)))) == names([{"n": 1}, {"n": 2}, {"n": 3}])


def test_no_more_trials_run_than_requested():
    sent = waves(Bayesian(AXES, 19, seed=1, batch_size=8), toy_score)
    assert [len(wave) for wave in sent] == [8, 8, 3]


def test_the_same_seed_proposes_the_same_and_another_does_not():
    first, again, other = (flat(waves(Bayesian(AXES, 24, seed), toy_score)) for seed in (7, 7, 8))
    assert first == again
    assert first != other


@pytest.mark.parametrize("score", [None, math.nan])
def test_where_nothing_is_feasible_the_search_ends_all_the_same(score):
    assert len(flat(waves(Bayesian(SMALL, 7, seed=0), lambda _: score))) == 7


def test_it_is_silent_and_leaves_the_settings_of_optuna(capfd):
    optuna = pytest.importorskip("optuna")
    before = optuna.logging.get_verbosity()
    waves(Bayesian(SMALL, 9, seed=0), lambda _: 1.0)
    assert capfd.readouterr() == ("", "")
    assert optuna.logging.get_verbosity() == before == logging.INFO


def test_only_suggested_settings_can_be_reported():
    strategy = Bayesian(SMALL, 9, seed=0, batch_size=1)
    with pytest.raises(InputError, match="only suggested settings"):
        strategy.report([({"kind": "c"}, 1.0)])
    [settings] = strategy.suggest()
    strategy.report([(settings, 1.0)])
    with pytest.raises(InputError, match="only once"):
        strategy.report([(settings, 1.0)])


@pytest.mark.parametrize(
    ("axes", "trials", "batch_size", "report"),
    [
        ([], 1, 1, "1 alternative or more"),
        ([{"n": (1,)}, {"n": ()}], 1, 1, "'n' has none"),
        (SMALL, 0, 1, "not 0 and 1"),
        (SMALL, 1, 0, "not 1 and 0"),
    ],
)
def test_what_cannot_be_searched_is_refused(axes, trials, batch_size, report):
    with pytest.raises(InputError, match=report):
        Bayesian(axes, trials, 0, batch_size)


def test_without_optuna_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtraError, match=r"Bayesian search needs .*lengthwise\[search\]"):
        Bayesian(SMALL, 1, 0)
