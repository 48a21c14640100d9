"""An engine that masks every query against the whole batch is found out; what no mask can cost is not taken for one.

Costs that grow otherwise with tokens than the tables say may still pass for masks, below twice a prompt's own pair.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planted_runs import LIMITS, measured, requests

from lengthwise import engine
from lengthwise.measure.calibration import calibrate, calibration, parameters
from lengthwise.measure.calibration.calibration import MAX_PAIR_RATIO, mask_notes, own_pair_s
from lengthwise.schema.errors import InputError

SHORT = {"prompt": (50, 300), "output": (10, 80)}


@pytest.fixture(scope="module")
def small():
    """Steps of few sequences are quick to simulate; attention is slow, so that pairs are felt in them."""
    limits = replace(LIMITS, max_num_seqs=32, max_num_batched_tokens=512, max_model_len=1024)
    made = engine.deploy("llama-3-8b", "H100", limits=limits)
    return replace(made, cost=replace(made.cost, prefill_s=30 * made.cost.prefill_s))


def runs(small, truth):
    return [measured(requests(rate, 50, seed, **SHORT), small, truth) for seed, rate in enumerate((6.0, 20.0))]


def pair_s(small):
    """A layer's seconds of one of a prompt's own pairs."""
    return small.cost.prefill_s[-1, 0] / 1024**2


@pytest.mark.slow
@pytest.mark.parametrize("pairs", [0.3, 1.6])
def test_planted_masks_are_found_where_the_other_parameters_explain_less(small, pairs):
    """Dear masks, too, which the other parameters first make up for by standing far off."""
    truth = {"work": 1.2, "masked": pairs * own_pair_s(small)}
    found = calibrate(runs(small, truth), small)
    assert found["masked"].determined
    assert found["masked"].low <= truth["masked"] <= found["masked"].high
    assert found["masked"].value == pytest.approx(truth["masked"], rel=0.3)
    assert found.tables.masked_s == found["masked"].value
    assert any(error.part == "masked" and error.log_sd > 0 for error in found.tables.evidence.errors)
    assert abs(found["work"].value / truth["work"] - 1) < 0.1
    assert any("dense masks are fitted" in note for note in found.notes)


@pytest.mark.slow
def test_an_engine_without_masks_is_left_without(small):
    found = calibrate(runs(small, {"work": 1.3, "host_step": 2e-3}), small)
    assert found.tables.masked_s == 0.0
    assert "masked" not in {p.name for p in found.parameters}


def test_masks_are_a_parameter_where_requested_or_known(small):
    def names(deployment, **requested):
        return [prior.name for prior in parameters.priors(deployment, logged=False, **requested)]

    known = replace(small, cost=replace(small.cost, masked_s=1e-12))
    assert "masked" not in names(small)
    assert "masked" in names(small, masked=True)
    assert "masked" in names(known)
    (prior,) = (k for k in parameters.priors(known, logged=False) if k.name == "masked")
    assert prior.neutral == prior.center == 1e-12
    assert parameters.apply(known.cost, {}).masked_s == 1e-12


def test_the_search_starts_from_seconds_of_a_prompts_own_pairs(small):
    (prior,) = (k for k in parameters.priors(small, logged=False, masked=True) if k.name == "masked")
    assert prior.value(0.0) == 0.0
    assert 0.2 < prior.center / pair_s(small) < 5
    bare = replace(small, cost=replace(small.cost, prefill_s=np.zeros_like(small.cost.prefill_s)))
    (prior,) = (k for k in parameters.priors(bare, logged=False, masked=True) if k.name == "masked")
    assert prior.center > 0


@pytest.mark.slow
def test_a_cost_beyond_that_of_a_mask_is_refused_with_a_warning(small, monkeypatch):
    monkeypatch.setattr(calibration, "MAX_PAIR_RATIO", 0.3)
    found = calibrate(runs(small, {"work": 1.2, "masked": pair_s(small)}), small)
    assert found.tables.masked_s == 0.0
    assert "masked" not in {p.name for p in found.parameters}
    assert any("were not fitted" in note for note in found.notes)


@pytest.mark.slow
@pytest.mark.parametrize("grown", [1.6, 2.5])
def test_projections_that_grow_with_tokens_are_taken_for_no_mask_beyond_a_prompts_own_pairs(small, grown):
    cost = small.cost
    by_tokens = 1 + (grown - 1) * np.minimum(1.0, np.arange(len(cost.layer_s)) / 512)
    other = replace(small, cost=replace(cost, layer_s=cost.layer_s * by_tokens))
    found = calibrate(runs(other, {}), small)
    prefill = found["prefill"].value
    assert found.tables.masked_s <= MAX_PAIR_RATIO * prefill * own_pair_s(small)
    assert (found.tables.masked_s > 0) == any("masks are fitted" in note for note in found.notes)


def test_a_prompts_own_pair_is_what_one_more_costs_in_the_largest_chunk(small):
    assert own_pair_s(small) == pytest.approx(pair_s(small), rel=0.5)
    flat = replace(small, cost=replace(small.cost, prefill_s=np.ones_like(small.cost.prefill_s)))
    assert own_pair_s(flat) == 0.0


def test_masks_are_noted_and_warned_about_where_they_cost_too_much(small):
    own_s = own_pair_s(small)
    assert mask_notes({"masked": 0.0}, small) == []
    (usual,) = mask_notes({"masked": own_s}, small)
    assert "costs 1 times" in usual
    assert "doubtful" not in usual
    (much,) = mask_notes({"masked": 3 * own_s}, small)
    assert "doubtful" in much
    (halved,) = mask_notes({"masked": 3 * own_s, "prefill": 2.0}, small)
    assert "doubtful" not in halved


def test_masks_are_looked_for_or_not_and_nothing_else(small):
    few = [measured(requests(6.0, 80, 0, **SHORT), small, {})]
    with pytest.raises(InputError, match="masks must be one of auto, no"):
        calibrate(few, small, masks="yes")
    with pytest.raises(InputError, match="never looked for"):
        calibrate(few, small, fit=["masked"], masks="no")


@pytest.mark.slow
def test_masks_that_may_not_be_searched_for_are_not_found(small):
    found = calibrate(runs(small, {"work": 1.2, "masked": pair_s(small)}), small, masks="no")
    assert found.tables.masked_s == 0.0
    assert "masked" not in {p.name for p in found.parameters}


def of_engine(runs, name):
    return [replace(run, metadata={**run.metadata, "engine": name}) for run in runs]


def test_engines_that_are_known_to_attend_by_request_have_none():
    few = [measured(requests(6.0, 10, 0, **SHORT), engine.deploy("llama-3-8b", "H100", limits=LIMITS), {})]
    assert calibration.unmasked_engines(of_engine(few, "vllm")) == ("vllm",)
    assert calibration.unmasked_engines(of_engine(few, "vllm") + of_engine(few, "SGLang")) == ("sglang", "vllm")
    for name in ("transformers 5.19.0 continuous batching", "transformers", "", None):
        assert calibration.unmasked_engines(of_engine(few, "vllm") + of_engine(few, name)) == ()
    assert calibration.unmasked_engines(few) == ()  # who serves is not known


@pytest.mark.slow
def test_masks_are_not_looked_for_in_runs_of_an_engine_that_has_none(small):
    masked = runs(small, {"work": 1.2, "masked": own_pair_s(small)})
    # Without masks tables are moved far and still miss: of runs that do not report their origin, with a warning.
    found = calibrate(of_engine(masked, "vllm"), small, allow=("warnings",))
    assert found.tables.masked_s == 0.0
    assert any("dense masks were not looked for: vllm attends by request" in note for note in found.notes)
    sent = calibrate(masked, small, masks="no", allow=("warnings",))
    assert [p.value for p in sent.parameters] == [p.value for p in found.parameters]
    assert found.simulations == sent.simulations
    assert not any("not looked for" in note for note in sent.notes)
