"""``lengthwise calibrate --masks``: dense masks are looked for, or never, and nothing else can be asked."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "measure"))

from planted_runs import measured, requests

from lengthwise import config, cost, measure
from lengthwise.usecases import variants

SCENARIO = """
[workload]
preset = "chat-1m"
num_requests = 10
request_rate = 1
[deployment]
model = "llama-3-8b"
gpu = "H100"
[engine]
max_num_seqs = 32
max_num_batched_tokens = 512
max_model_len = 1024
"""


@pytest.fixture(scope="module")
def requested(tmp_path_factory):
    """The words of a calibration: tables of slow attention, and runs whose masks cost what a prompt's own pairs do."""
    folder = tmp_path_factory.mktemp("masks")
    path, slow = folder / "mine.toml", folder / "slow.npz"
    path.write_text(SCENARIO, "utf-8")
    (variant,) = variants.build(config.load(path))
    bare = variant.deployment
    given = replace(bare, cost=replace(bare.cost, prefill_s=30 * bare.cost.prefill_s))
    cost.save(given.cost, slow)
    own_pair_s = given.cost.prefill_s[-1, 0] / given.max_model_len**2
    truth, words = {"work": 1.2, "masked": own_pair_s}, ["calibrate", path]
    for seed, rate in enumerate((6.0, 20.0)):
        run = measured(requests(rate, 80, seed, prompt=(50, 300), output=(10, 80)), given, truth)
        words.append(folder / f"{seed}.parquet")
        measure.write_records(run, words[-1])
    return [*words, "--cost", f"tables:{slow}"]


@pytest.mark.slow
def test_masks_are_used_only_where_they_are_searched_for(cli, requested, tmp_path):
    reported = {}
    for masks in ("auto", "no"):
        out, numbers = tmp_path / f"{masks}.npz", tmp_path / f"{masks}.json"
        finished = cli(*requested, "--masks", masks, "--out", out, "--json", numbers, "--force")
        assert finished.code == 0, finished.err
        names = {p["name"] for p in json.loads(numbers.read_text("utf-8"))["parameters"]}
        reported[masks] = ("masked" in names, "dense masks are fitted" in finished.out, cost.load(out).masked_s > 0)
    assert reported == {"auto": (True, True, True), "no": (False, False, False)}


@pytest.mark.parametrize(
    ("more", "report"),
    [
        (["--masks", "yes"], "masks must be one of auto, no; it is 'yes'"),
        (["--masks", "no", "--fit", "masked"], "never looked for (masks 'no')"),
    ],
)
def test_invalid_mask_options_are_reported_with_the_valid_ones(cli, requested, tmp_path, more, report):
    finished = cli(*requested, *more, "--out", tmp_path / "cost.npz")
    assert finished.code == 2
    assert report in finished.err
    assert not (tmp_path / "cost.npz").exists()
