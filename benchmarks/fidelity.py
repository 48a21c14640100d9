"""Fidelity: what was predicted against what was measured, for every ground truth that this machine allows.

``live`` starts real engines (make engine torch); ``recorded``, ``calibrated`` and ``silicon`` read recorded runs
from the folder ``shared`` beside the checkout (or LENGTHWISE_SHARED, or --shared) and say where it is absent;
``profiles`` measures this machine's operators. --save keeps the rows in results/fidelity.json, from which
docs/fidelity.md is made (python docs/generate_fidelity.py).
"""

from __future__ import annotations

import sys

from _sections import Sections

MODULES = {
    "live": "_live",
    "recorded": "_recorded",
    "calibrated": "_calibrate",
    "silicon": "_silicon",
    "profiles": "_profiles",
}

TARGETS: dict[str, tuple[float, str, str]] = {  # name: target, which way is better, unit
    "fidelity.live.jct_p50_error": (0.10, "lower", "relative"),
    "fidelity.live.jct_p95_error": (0.10, "lower", "relative"),
    "fidelity.live.ttft_p50_error": (0.10, "lower", "relative"),
    "fidelity.live.tpot_p50_error": (0.05, "lower", "relative"),
    "fidelity.recorded.ttft_mape": (0.05, "lower", "relative"),
    "fidelity.recorded.tpot_mape": (0.017, "lower", "relative"),
    "fidelity.recorded.latency_mape": (0.022, "lower", "relative"),
    "fidelity.silicon.roofline_unseen.ttft_median_ape": (0.20, "lower", "relative"),
    "fidelity.silicon.roofline_unseen.tpot_median_ape": (0.10, "lower", "relative"),
    "fidelity.silicon.tables.ttft_median_ape": (0.10, "lower", "relative"),
    "fidelity.silicon.tables.tpot_median_ape": (0.05, "lower", "relative"),
    "profile.cv_median_error": (0.05, "lower", "relative"),
    "profile.import_h200_s": (20.0, "lower", "s"),
    "calibrate_300_s": (60.0, "lower", "s"),
}

SECTIONS = Sections("fidelity", __doc__.splitlines()[0], MODULES, TARGETS)

if __name__ == "__main__":
    sys.exit(SECTIONS.main())
