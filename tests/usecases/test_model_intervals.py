"""The cost model's own error as an interval, and the notes on runs beyond the measurements."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from lengthwise import config, engine, metrics
from lengthwise.cli import main
from lengthwise.cost import HostOverhead, save
from lengthwise.cost.model_error import PARTS, design, perturbed
from lengthwise.engine import deploy
from lengthwise.metrics import beyond_reach
from lengthwise.schema.cost_tables import CostEvidence, CostTables, PartError, Reach
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError
from lengthwise.schema.estimate import Estimate
from lengthwise.search.workers import available_cpus
from lengthwise.usecases import simulate, variants

RATE, BUSY_RATE = 2.0, 42.0


def requested(rate: float = RATE, **run: int) -> config.Scenario:
    reported = "\n".join(f"{key} = {value}" for key, value in run.items())
    return config.loads(
        f"""
        [workload]
        isl = {{ kind = "uniform", low = 100, high = 900 }}
        osl = {{ kind = "uniform", low = 20, high = 300 }}
        num_requests = 500
        request_rate = {rate}
        [deployment]
        model = "llama-3-8b"
        gpu = "H100"
        [run]
        {reported}
        """
    )


def outcome(errors: tuple[PartError, ...] | None, rate: float = RATE, **run: int) -> simulate.VariantOutcome:
    (variant,) = variants.build(requested(rate, **run))
    if errors is not None:
        cost = variant.deployment.cost
        cost = replace(cost, evidence=replace(cost.evidence, errors=errors))
        variant = replace(variant, deployment=replace(variant.deployment, cost=cost))
    (one,) = simulate.run(requested(rate, **run), variants=[variant], jobs=available_cpus())
    return one


def estimates(tree: object) -> list[Estimate]:
    if isinstance(tree, Estimate):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple) else ()
    parts = parts or getattr(tree, "__dict__", {}).values()
    return [one for part in parts for one in estimates(part)]


def width(estimate: Estimate) -> float:
    return estimate.model_high - estimate.model_low


@pytest.fixture(scope="module")
def quiet() -> simulate.VariantOutcome:
    return outcome((PartError("step", 0.1),))


def test_there_is_no_interval_without_errors() -> None:
    plain = outcome(())
    assert plain.model_draws == 0
    assert plain.notes == ()
    assert math.isnan(plain.summary.intervals.model_level)
    assert not any(one.has_model_interval for one in estimates(plain.summary))


def test_errors_change_no_number_but_the_interval(quiet) -> None:
    plain = outcome(())
    pairs = zip(estimates(plain.summary), estimates(quiet.summary), strict=True)
    assert all(a.value == b.value or (math.isnan(a.value) and math.isnan(b.value)) for a, b in pairs)
    assert quiet.summary.counts == plain.summary.counts


def test_every_interval_holds_its_number(quiet) -> None:
    reported = [one for one in estimates(quiet.summary) if one.has_model_interval]
    assert len(reported) > 50
    assert all(one.model_low <= one.value <= one.model_high for one in reported)


def test_the_interval_grows_with_the_error_and_has_the_stated_width(quiet) -> None:
    small = outcome((PartError("step", 0.02),)).summary.tpot_s.mean
    large = quiet.summary.tpot_s.mean
    assert 0 < width(small) < width(large)
    # with few others in a step, time per token is in proportion to the step's time: 5th to 95th percentile
    assert math.log(small.model_high / small.model_low) == pytest.approx(2 * 1.645 * 0.02, rel=0.25)


def test_near_saturation_it_is_wider_and_leans_to_the_slow_side(quiet) -> None:
    busy = outcome((PartError("step", 0.1),), BUSY_RATE).summary.ttft_s.mean
    calm = quiet.summary.ttft_s.mean
    assert width(busy) / busy.value > 2 * width(calm) / calm.value
    assert busy.model_high - busy.value > 2 * (busy.value - busy.model_low)


def test_it_is_the_same_every_time(quiet) -> None:
    again = outcome((PartError("step", 0.1),))
    assert repr(again.summary) == repr(quiet.summary)


def test_over_seeds_it_moves_with_the_mean() -> None:
    several = outcome((PartError("step", 0.1),), seeds=3)
    ttft = several.summary.ttft_s.mean
    assert several.model_draws == 16
    assert ttft.model_low < ttft.value < ttft.model_high
    assert ttft.half_width > 0
    shares = [several.summary.hardware.busy_share, *several.summary.hardware.time_shares.values()]
    assert all(share.model_high <= 1 for share in shares)


def test_seeds_that_carry_intervals_are_combined_with_them(quiet) -> None:
    other = replace(quiet.summary, seeds=(1,))
    both = metrics.combine([quiet.summary, other]).jct_s.p50
    assert both.model_low == pytest.approx(quiet.summary.jct_s.p50.model_low)
    assert both.model_high == pytest.approx(quiet.summary.jct_s.p50.model_high)


def test_the_roofline_carries_its_published_errors() -> None:
    deployment = variants.build(requested())[0].deployment
    errors = {error.part: error.log_sd for error in deployment.cost.evidence.errors}
    assert set(errors) == set(PARTS) - {"masked", "shared"}
    assert errors["layer"] == pytest.approx(math.log(1.11) / 0.6745, abs=1e-3)  # GEMMs of an H100
    unseen = replace(deployment.gpu, name="My-GPU")
    widest = engine.deploy(deployment.model, unseen, node=deployment.node).cost.evidence.errors
    assert all(error.log_sd >= errors.get(error.part, 0.0) for error in widest)


def tables() -> CostTables:
    return variants.build(requested())[0].deployment.cost


def test_a_part_that_takes_no_time_takes_no_column() -> None:
    cost = replace(tables(), evidence=CostEvidence(errors=(PartError("comm", 0.5),)))
    assert not cost.comm_s.any()
    assert perturbed(cost) == []


def test_a_front_has_an_error_of_its_own_and_no_step_moves_it() -> None:
    cost = deploy("llama-3-8b", "H100", host=HostOverhead(request_s=0.01, serial_s=0.002)).cost
    cost = replace(cost, evidence=CostEvidence(errors=tuple(PartError(e.part, e.log_sd) for e in cost.evidence.errors)))
    draws = perturbed(cost)
    factors = np.array([drawn.front.request_s for drawn in draws]) / cost.front.request_s
    assert np.log(factors).std() == pytest.approx(0.7, rel=0.1)
    assert np.allclose([drawn.front.serial_s / cost.front.serial_s for drawn in draws], factors)
    bare = [replace(cost, evidence=CostEvidence(errors=(PartError("step", 0.1),))), deploy("llama-3-8b", "H100").cost]
    assert all(drawn.front == given.front for given in bare for drawn in perturbed(given))


def test_factors_have_the_requested_spread() -> None:
    cost = replace(tables(), evidence=CostEvidence(errors=(PartError("layer", 0.2), PartError("decode", 0.1))))
    off = perturbed(cost, 64)
    for part, sd in (("layer_s", 0.2), ("decode_s", 0.1), ("head_s", 0.0)):
        logs = [math.log(getattr(one, part).max() / getattr(cost, part).max()) for one in off]
        assert np.mean(logs) == pytest.approx(0, abs=1e-9)
        assert np.std(logs) == pytest.approx(sd, rel=0.05, abs=1e-9)


def test_the_design_draws_every_stratum_once_and_parts_independently() -> None:
    made = design(16, 6)
    assert all((np.sort(column) == np.sort(made[:, 0])).all() for column in made.T)
    off = np.corrcoef(made.T) - np.eye(6)
    assert np.abs(off).max() < 0.4


def test_draws_are_a_setting(quiet) -> None:
    none = outcome((PartError("step", 0.1),), model_draws=0)
    assert none.model_draws == 0
    assert none.notes == ("The cost model's own error is not in the intervals: run.model_draws is 0.",)
    many = outcome((PartError("step", 0.1),), model_draws=40)
    assert many.model_draws == 40
    assert width(many.summary.tpot_s.mean) == pytest.approx(width(quiet.summary.tpot_s.mean), rel=0.15)
    with pytest.raises(InputError, match="at least 10"):
        requested(model_draws=3)


def test_large_runs_are_not_repeated_unasked(monkeypatch) -> None:
    monkeypatch.setattr("lengthwise.cost.model_error.MAX_REPEATED_REQUESTS", 499)
    large = outcome((PartError("step", 0.1),))
    assert large.model_draws == 0
    assert "runs of more than 499 requests are not repeated by default" in large.notes[0]
    assert outcome((PartError("step", 0.1),), model_draws=10).model_draws == 10


def within(deployment: Deployment, **bounds: int) -> Deployment:
    return replace(
        deployment, cost=replace(deployment.cost, evidence=replace(deployment.cost.evidence, reach=Reach(**bounds)))
    )


def test_extrapolation_is_reported_exactly_when_it_occurs() -> None:
    (variant,) = variants.build(requested(BUSY_RATE))
    records = engine.simulate(variant.workload(0), variant.deployment, seed=0)
    steps, r = records.steps, records.requests
    most = {
        "tokens": int((steps.decode_seqs + steps.prefill_tokens).max()),
        "seqs": int((steps.decode_seqs + steps.prefill_seqs).max()),
        "context": int((r.prompt_tokens + r.output_tokens).max()),
        "kv_tokens": int(steps.kv_blocks.max()) * variant.deployment.kv.block_size,
    }
    for bound, largest in most.items():
        assert beyond_reach(records, within(variant.deployment, **{bound: largest})) == ()
        (found,) = beyond_reach(records, within(variant.deployment, **{bound: largest - 1}))
        assert (found.bound, found.measured, found.largest) == (bound, largest - 1, largest)
        assert 0 < found.out_of_range < found.of
    assert beyond_reach(records, variant.deployment) == ()  # nothing is known of a roofline's reach


def test_chunks_are_those_of_one_prompt() -> None:
    (variant,) = variants.build(requested())
    records = engine.simulate(variant.workload(0), variant.deployment, seed=0)
    longest = int(records.requests.prompt_tokens.max())
    assert beyond_reach(records, within(variant.deployment, chunk=2048)) == ()
    (found,) = beyond_reach(records, within(variant.deployment, chunk=longest // 2))
    assert found.bound == "chunk"
    assert found.largest >= longest


def test_prefixes_before_a_chunk_are_reported_only_where_prompts_are_chunked() -> None:
    """Tables of prompts measured whole: there is no note on a run that cuts none, whatever its lengths."""
    for rate, budget, cut in ((RATE, 8192, False), (BUSY_RATE, 256, True)):
        set_ = [f"engine.max_num_batched_tokens={budget}"]
        (variant,) = variants.build(config.loads(requested(rate).to_toml(), overrides=set_))
        deployment = within(variant.deployment, chunk=8192, context=1200, prefix=0)
        for steps in (100_000, 0):
            records = engine.simulate(variant.workload(0), variant.deployment, seed=0, max_log_steps=steps)
            found = beyond_reach(records, deployment)
            assert [one.bound for one in found] == ["prefix"] * cut
            longest = int(records.requests.prompt_tokens.max())
            assert beyond_reach(records, within(variant.deployment, prefix=longest - 1)) == ()
            for one in found:
                assert (one.measured, one.largest, one.unit) == (0, longest - 1, "requests")
                assert 0 < one.out_of_range <= one.of
                assert "tokens of a prompt cached before a chunk of it (up to" in one.description


def test_without_steps_time_bins_are_used() -> None:
    (variant,) = variants.build(requested(BUSY_RATE))
    records = engine.simulate(variant.workload(0), variant.deployment, seed=0, max_log_steps=0)
    (found,) = beyond_reach(records, within(variant.deployment, seqs=8))
    assert found.unit == "time"
    assert found.largest > 8


def test_every_output_reports_extrapolation_and_explains_brackets(tmp_path, capsys) -> None:
    cost = replace(tables(), evidence=CostEvidence(errors=(PartError("step", 0.1),), reach=Reach(seqs=4)))
    (variant,) = variants.build(requested())
    variant = replace(variant, deployment=replace(variant.deployment, cost=cost))
    (reported,) = simulate.run(requested(), variants=[variant])
    from lengthwise.cli.simulate import show, write
    from lengthwise.usecases.simulate import result_of

    results = [result_of(reported)]
    show(requested(), results)
    write(results, tmp_path / "a.json", tmp_path / "a.html", quiet=True)
    printed, page = " ".join(capsys.readouterr().out.split()), (tmp_path / "a.html").read_text("utf-8")
    made = json.loads((tmp_path / "a.json").read_text("utf-8"))["results"][0]
    (note,) = reported.notes
    assert "than the measurements behind the cost tables reached (4): their times are extrapolated" in note
    assert note in printed
    assert note in page
    assert made["notes"] == [note]
    assert made["beyond_reach"][0]["bound"] == "seqs"
    assert "In parentheses: 90 % intervals of the cost model's error, from 16 more runs" in printed
    assert "model-span" in page
    assert made["model_error"]["parts"] == [{"part": "step", "log_sd": 0.1}]
    assert made["summary"]["model_level"] == 0.9
    ttft = made["summary"]["ttft_s"]["mean"]
    assert ttft["model_low"] < ttft["value"] < ttft["model_high"]


def test_tables_from_a_file_carry_no_errors_and_show_none(tmp_path, capsys) -> None:
    save(replace(tables(), evidence=CostEvidence()), tmp_path / "costs.npz")
    path = tmp_path / "s.toml"
    path.write_text(requested().to_toml())
    assert main(["simulate", str(path), "--cost", f"tables:{tmp_path / 'costs.npz'}"]) == 0
    assert "In parentheses" not in capsys.readouterr().out
