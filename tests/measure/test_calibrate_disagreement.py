"""Runs that surely disagree with tables, moved or not, are no calibration; nor is their stated model trusted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lengthwise import deploy
from lengthwise.measure import read_records
from lengthwise.measure.calibration import Calibration, Parameter, Score, calibrate, read_iterations
from lengthwise.measure.calibration.measured_runs import origin_notes, run_of
from lengthwise.schema.deployment import EngineLimits
from lengthwise.schema.errors import InputError
from lengthwise.schema.specs import GpuSpec
from lengthwise.usecases.calibrate import require_improvement

RETAINED = Path(__file__).parent / "data" / "slow_cpu" / "vllm"
"""A tiny model on a thread of a slow CPU, whose records tell neither: too slow to pass for a large one on a GPU."""


def found(*, value: float, low: float, high: float) -> Calibration:
    """One parameter that was 1 before, and one mean of held-out requests with its interval."""
    work = Parameter("work", "token work", "x", value, 0.1, 2.0, 1.0, determined=True, effect=0.5)
    return Calibration(
        tables=deploy("opt-125m", "H100").cost,
        parameters=(work,),
        scores=(Score("half", "tpot", "mean", 0.01, 1.7, (low + high) / 2, low, high),),
        client_s=0.0,
        log_sd=0.1,
        split="on half",
        fitted=100,
        held_out=50,
        simulations=10,
    )


def test_a_sure_disagreement_with_nothing_moved_is_an_error_unless_one_insists():
    lost = found(value=1.0, low=1.2, high=2.2)
    with pytest.raises(InputError, match=r"TPOT by \+170% on half.*--iterations"):
        require_improvement(lost)


@pytest.mark.parametrize(
    ("value", "low", "high"), [(1.0, -0.3, 0.6), (1.0, 0.02, 0.05), (0.5, 1.2, 2.2)], ids=["unsure", "small", "changed"]
)
def test_what_noise_explains_and_what_was_moved_is_written(value, low, high):
    require_improvement(found(value=value, low=low, high=high))


@pytest.mark.parametrize(
    ("value", "low", "high", "doubted"),
    [
        (4.0, 0.3, 0.5, True),
        (0.25, -0.6, -0.3, True),
        (2.5, 0.3, 0.5, False),
        (4.0, 0.12, 0.3, False),
        (4.0, -0.1, 0.9, False),
    ],
    ids=["slower", "faster", "moved little", "near enough", "unsure"],
)
def test_tables_that_were_moved_far_and_are_far_off_are_warned_about(value, low, high, doubted):
    one_warning = found(value=value, low=low, high=high).warning
    assert bool(one_warning) is doubted
    assert not doubted or f"token work to {value:g} times" in one_warning


@pytest.mark.parametrize(
    ("metadata", "report"),
    [
        ({}, False),
        ({"model": "tiny"}, False),
        ({"model": "tiny", "deployment": {"gpu": "H100"}}, False),
        ({"model": "meta-llama/Llama-3.1-8B-Instruct"}, True),
        ({"deployment": {"model": "tiny", "model_shape": {"layers": 32}}}, True),
    ],
)
def test_runs_of_an_unknown_model_are_noted_and_refused_where_they_fit_badly(metadata, report, run, deployment):
    far = found(value=4.0, low=0.3, high=0.5)
    runs = [run_of(replace(run, metadata=metadata), "half", 0.3)]
    noted = "the origin of these runs is unknown: half"
    allowed = " ".join(origin_notes(far, runs, deployment, ["warnings"]))
    assert "token work to 4 times" in allowed
    assert (noted in allowed) is not report
    near = origin_notes(found(value=1.2, low=-0.05, high=0.05), runs, deployment, ())
    assert [note.startswith(noted) for note in near] == [True] * (not report)
    if report:
        assert origin_notes(far, runs, deployment, ()) == origin_notes(far, runs, deployment, ["warnings"])
        return
    with pytest.raises(InputError, match=r"token work to 4 times.*TPOT by \+40% on half.*--allow-warnings"):
        origin_notes(far, runs, deployment, ())


def with_host(*, low_s: float, share: float, after: float = 0.05) -> Calibration:
    """A host that was 0.1 ms a step and now is twice ``low_s``, of ``share`` of the steps' time."""
    host = Parameter(
        "host_step",
        "host",
        "s",
        2 * low_s,
        low_s,
        4 * low_s,
        1e-4,
        determined=True,
        effect=0.5,
        bare=(low_s, 4 * low_s),
    )
    off = Score("half", "tpot", "mean", 0.01, 1.7, after, after - 0.02, after + 0.02)
    made = found(value=1.0, low=-0.1, high=0.1)
    return replace(made, parameters=(*made.parameters, host), scores=(off,), host_share=share)


@pytest.mark.parametrize(
    ("low_s", "share", "after", "words"),
    [
        (10e-3, 0.8, 0.05, "host to 200 times what is usual, 80% of the time of steps"),
        (10e-3, 0.4, 0.5, "host to 200 times what is usual, and held-out means are still off: TPOT by +50%"),
        (10e-3, 0.4, 0.05, ""),
        (2e-3, 0.8, 0.05, ""),
        (2e-3, 0.8, 0.5, ""),
    ],
    ids=["takes all", "fits badly", "beside slow kernels", "slow, believable", "believable, off"],
)
def test_a_host_that_absorbs_missing_table_costs_is_warned_about(low_s, share, after, words):
    one_warning = with_host(low_s=low_s, share=share, after=after).warning
    assert words in one_warning
    assert bool(one_warning) is bool(words)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["H100", "RTX-PRO-6000"])
@pytest.mark.parametrize("fit", [None, ["work"]], ids=["whatever", "work"])
def test_a_run_of_another_model_and_device_is_refused(gpu, fit):
    """A tiny model on a CPU, of which the records tell neither, for a large one on a GPU."""
    other = read_records(RETAINED / "wide-half-0.measured.parquet")
    with pytest.raises(InputError, match=r"these probably are not: the calibration moved .* is unknown"):
        calibrate([other], deploy("llama-3.1-8b", gpu), fit=fit)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["H100", "RTX-PRO-6000"])
def test_its_log_of_steps_does_not_make_it_right(gpu):
    other = read_records(RETAINED / "wide-half-0.measured.parquet")
    log = read_iterations(RETAINED / "wide-half-0.iterations.log")
    with pytest.raises(InputError, match=r"these probably are not: the calibration moved host"):
        calibrate([other], deploy("llama-3.1-8b", gpu), iterations=log)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["H100", "A100-80GB"])
def test_a_fit_that_looks_well_by_a_host_beyond_belief_is_refused(gpu):
    other = read_records(RETAINED.parent / "transformers" / "fifo-half-0.measured.parquet")
    with pytest.raises(InputError, match=r"moved host, each step to \d+ times what is usual"):
        calibrate([other], deploy("llama-3.1-8b", gpu))


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "setting"), [("vllm", "wide-half-0"), ("transformers", "fifo-half-0")])
def test_runs_on_their_own_slow_device_are_accepted_though_none_names_it(engine, setting):
    folder = RETAINED.parent / engine
    retained = json.loads((folder / "device.json").read_text())["gpu"]
    cpu = GpuSpec(**retained | {"aliases": tuple(retained["aliases"])})
    limits = EngineLimits(max_num_seqs=32, max_model_len=1024, weight_dtype="float32", kv_dtype="float32")
    run = read_records(folder / f"{setting}.measured.parquet")
    model = str(next(path for path in (folder / "small.json", RETAINED / "small.json") if path.exists()))
    own = calibrate([run], deploy(model, cpu, limits=limits, num_blocks=512))
    assert own.warning == ""
    assert own.host_share < 0.5


@pytest.mark.slow
def test_doubtful_runs_are_accepted_where_allowed_and_noted():
    other = read_records(RETAINED / "wide-half-0.measured.parquet")
    taken = calibrate([other], deploy("llama-3.1-8b", "H100"), allow=["warnings"])
    assert any("is unknown" in note for note in taken.notes)
    assert any(taken.warning in note for note in taken.notes)
