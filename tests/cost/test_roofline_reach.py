"""The less is known of hardware, the wider the roofline's errors, and the words say so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lengthwise import catalog, engine
from lengthwise.cost import roofline_note
from lengthwise.cost.estimators.cross_validation import TRANSFER_FACTORS
from lengthwise.cost.roofline_tables import TRANSFER_FACTOR, UNKNOWN_STEP_LOG_SD, roofline_errors

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = catalog.model("llama-3.1-8b")


def errors(gpu):
    return {e.part: e.log_sd for e in roofline_errors(MODEL, gpu, "bfloat16")}


def test_each_step_away_from_what_was_measured_widens_every_kernel():
    known, other, cpu = (catalog.gpu(name) for name in ("H100", "L4", EXAMPLES / "gpus/cpu.toml"))
    near, far, unknown = errors(known), errors(other), errors(cpu)
    for part in ("layer", "head", "prefill", "decode", "comm", "embedding"):
        assert far[part] > 1.2 * near[part]
        assert unknown[part] == far[part]
    assert "step" not in near | far
    assert np.exp(1.645 * unknown["step"]) == pytest.approx(3, rel=0.01)
    assert unknown["step"] == UNKNOWN_STEP_LOG_SD


def test_the_factor_of_another_gpu_is_the_one_that_was_measured():
    assert TRANSFER_FACTORS["gpu"] == TRANSFER_FACTOR


def test_hardware_of_a_known_name_that_a_user_describes_has_the_known_errors():
    gpu = catalog.gpu("H100")
    assert errors(replace(gpu, price_per_hour_usd=1.0)) == errors(gpu)


def test_the_note_names_what_is_unknown_and_a_remedy():
    assert roofline_note(catalog.gpu("H100")) == ""
    assert "fitted to other GPUs" in roofline_note(catalog.gpu("L4"))
    reported = roofline_note(catalog.gpu(EXAMPLES / "gpus/cpu.toml"))
    assert "Nothing was measured on EPYC-9654" in reported
    assert "calibrate" in reported


@pytest.mark.parametrize("name", sorted(catalog.gpus()))
def test_a_gpu_of_another_vendor_needs_a_calibration(name):
    """docs/fidelity.md has the error of MI300X, the only GPU of another vendor with measurements."""
    gpu = catalog.gpu(name)
    is_another = name.startswith(("MI", "TPU", "Gaudi"))
    assert ("do not use these numbers without a calibration" in roofline_note(gpu)) == is_another
    assert gpu.is_nvidia == (not is_another and not gpu.is_cpu)
    assert gpu.is_nvidia == (not is_another and not name.startswith("CPU"))


def test_a_deployment_on_a_described_cpu_carries_the_step_error():
    deployed = engine.deploy("llama-3.2-1b", str(EXAMPLES / "gpus/cpu.toml"))
    assert "step" in {e.part for e in deployed.cost.evidence.errors}
