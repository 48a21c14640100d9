"""examples/reference.toml names every key, its default and its other spellings."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from lengthwise import config
from lengthwise.config import scenario as _canonical
from lengthwise.config.scenario import Scenario
from lengthwise.config.values import ARRIVALS, LENGTHS
from lengthwise.usecases import simulate

PATH = Path(__file__).parents[2] / "examples" / "reference.toml"
TEXT = PATH.read_text("utf-8")
BASE = '[deployment]\nmodel = "x"\ngpu = "y"\n[workload]\n'


def lines_of(section):
    body = re.split(rf"^\[+{section}\]+.*$", TEXT, flags=re.MULTILINE)[1]
    return re.split(r"^\[", body, flags=re.MULTILINE)[0]


@pytest.mark.parametrize("section", ["workload", "deployment", "engine", "scheduler", "predictor", "slo", "run"])
def test_every_key_and_every_alias_is_present(section):
    keys = Scenario.model_fields[section].annotation.model_fields
    written = set(re.findall(r"^(?:#: )?(\w+) =", lines_of(section), flags=re.MULTILINE))
    assert written == set(keys)
    for alias, key in _canonical.ALIASES[section].items():
        line = next(line for line in lines_of(section).splitlines() if re.match(rf"(#: )?{key} =", line))
        assert re.search(rf"\b{alias}\b", line), f"{alias} is not named beside {section}.{key}"


def test_every_distribution_and_process_is_present():
    for kind in [*LENGTHS.keys() - {"fixed"}, *ARRIVALS]:
        assert re.search(rf"\b{kind}\b", TEXT), kind


EXCLUDED = [line[3:] for line in lines_of("workload").splitlines() if line.startswith("#: ")]
PREDICTORS = {
    "file": {"kind": "model"},
    "tokens": {"kind": "same"},
    "buckets": {"kind": "bucket_ecdf"},
    "sigma": {"kind": "lognormal_error"},
    "bias": {"kind": "lognormal_error", "sigma": 1.0},
    "exact_lengths": {"kind": "lognormal_error", "sigma": 1.0},
    "half_life_tokens": {"kind": "lognormal_error", "sigma": 1.0},
    "boundaries": {"kind": "quantised"},
    "p": {"kind": "bin_neighbour", "boundaries": 4},
    "split": {"kind": "bin_neighbour", "boundaries": 4, "p": 0.1},
    "matrix": {"kind": "confusion", "boundaries": 2},
    "pivot": {"kind": "reversed"},
}


def companion(key, value):
    """What a workload needs beside a line to be whole."""
    kind = value.get("kind") if isinstance(value, dict) else value
    if key in ("prompt", "output", "correlation"):
        lengths = {"prompt": 5, "output": 5, "concurrency": 3}
        return {other: number for other, number in lengths.items() if other != key}
    if key in ("session_rate", "sessions", "groups", "tools"):
        load = {"sessions.turns": 2.0} if key == "session_rate" else {"session_rate": 1.0}
        return {"prompt": 5, "output": 5} | ({"request_rate": 1.0} if key == "groups" else load)
    rate = {"request_rate": 1.0} if kind == "gamma" else {}
    return rate if key == "trace" else rate | {"trace": "t.csv"}


@pytest.mark.parametrize("line", EXCLUDED)
def test_lines_that_are_not_in_force_are_right_too(line):
    key, value = next(iter(tomllib.loads(line).items()))
    settings = "\n".join(f"{other} = {given!r}" for other, given in companion(key, value).items())
    found = config.loads(f"{BASE}{settings}\n{line}")
    assert getattr(found.workload, key) is not None


@pytest.mark.parametrize("line", [s[3:] for s in lines_of("predictor").splitlines() if s.startswith("#: ")])
def test_predictors_lines_that_are_not_in_force_are_right_too(line):
    key, value = next(iter(tomllib.loads(line).items()))
    settings = "\n".join(f"{other} = {given!r}".replace("'", '"') for other, given in PREDICTORS[key].items())
    load = 'preset = "chat-1m"\nrequest_rate = 1.0\n'
    found = config.loads(f"{BASE}{load}[predictor]\n{settings}\n{line}")
    assert getattr(found.predictor, key) == value


def test_defaults_are_the_defaults():
    found = config.load(PATH)
    for section in ("engine", "run"):
        model = getattr(found, section)
        for key, field in type(model).model_fields.items():
            if field.default is not None:
                assert getattr(model, key) == field.default, key


def test_it_runs():
    first, second = simulate.run(PATH)
    assert first.summary.counts.finished == second.summary.counts.finished == 200
    assert second.summary.jct_s != first.summary.jct_s
