"""Cost tables of an application's models are calibrated to engines under the lengths that the sample had."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from app_profile_world import GPU, launcher, space

from lengthwise import measure
from lengthwise.backend.openai_protocol import Server
from lengthwise.schema.app import ModelPlan
from lengthwise.usecases.app_profile_measurement import (
    bench_without_disturbance,
    calibrate_replica,
    calibration_loads,
    concurrencies,
    jct_errors,
    require_improvement,
)

LENGTHS = (np.arange(10, 40), np.arange(4, 34))


def test_concurrencies_are_one_some_and_all():
    assert concurrencies(256) == (1, 16, 256)
    assert concurrencies(4) == (1, 2, 4)
    assert concurrencies(2) == (1, 2)
    assert concurrencies(1) == (1,)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 4, 64])
def test_loads_have_lengths_of_the_sample_within_what_the_model_takes(max_num_seqs):
    loads = list(calibration_loads(max_num_seqs, LENGTHS, 40, seed=3))
    assert [load.concurrency for load in loads] == list(concurrencies(max_num_seqs))
    pairs = set(zip(*(column.tolist() for column in LENGTHS), strict=True))
    for load in loads:
        assert (load.prompt_tokens + load.output_tokens <= 40).all()
        complete = load.prompt_tokens + load.output_tokens < 40
        own = zip(load.prompt_tokens[complete].tolist(), load.output_tokens[complete].tolist(), strict=True)
        assert set(own) <= pairs
        assert load.output_tokens.min() >= 2
    assert sum(len(load) for load in loads) >= 100
    again = list(calibration_loads(max_num_seqs, LENGTHS, 40, seed=3))
    assert all((a.prompt_tokens == b.prompt_tokens).all() for a, b in zip(loads, again, strict=True))


@pytest.mark.parametrize(("disturbed", "sent"), [(0, 1), (2, 3), (9, 4)])
def test_a_load_is_sent_again_while_the_client_is_disturbed(tmp_path, monkeypatch, disturbed, sent):
    calls = []

    def bench(server, load, settings, *, deployment):
        calls.append(settings)
        client = {"loop_lag": {"surely_often": len(calls) <= disturbed}, "late_doubt": None}
        return SimpleNamespace(metadata={"client": client}, warnings=())

    monkeypatch.setattr(measure, "bench", bench)
    load = next(calibration_loads(1, LENGTHS, 40, seed=3))
    bench_without_disturbance(Server("http://127.0.0.1:1"), load, space().deployment(ModelPlan(0, GPU)), seed=3)
    assert len(calls) == sent


@pytest.mark.slow
def test_calibration_finds_an_engine_that_is_far_slower_than_its_roofline(tmp_path):
    """Each step of the emulated engine takes 10 ms, where the roofline of so small a model has less than one."""
    own, plan = launcher(tmp_path, more="--fixed-s 0.01"), ModelPlan(0, GPU)
    found, requests = calibrate_replica(own, plan, (0,), space().deployment(plan), LENGTHS)
    require_improvement(found)
    before, after = jct_errors(found)
    assert after < before / 3
    assert before > 0.5
    assert requests >= 100
    assert not own.running
