"""Fidelity: predictions against measurements, for every ground truth that this machine allows.

``live`` starts real engines (make engine torch); ``recorded``, ``calibrated``, ``silicon`` and ``brackets`` read the
folder ``shared``; ``coverage`` and ``counters`` calibrate to planted runs; ``times`` measures calibrations,
``profiles`` this machine's operators; ``gpu`` runs gpu_campaign.py. --save archives campaigns that newer ones replace
in results/fidelity-earlier.json; --take ROWS.JSON takes rows that were measured separately (_live.py --out).
"""

from _harness import making
from _sections import Sections

MODULES = {
    "live": "_live",
    "recorded": "_recorded",
    "calibrated": "_recorded:calibrated",
    **{section: f"_planted:{section}" for section in ("coverage", "counters", "times", "profiles")},
    "silicon": "_silicon",
    "brackets": "_brackets",
    "gpu": "gpu_campaign",
}

TARGETS: dict[str, tuple[float, str, str]] = {  # name: (target, better, unit)
    **{f"fidelity.live.{name}_error": (0.10, "lower", "relative") for name in ("jct_p50", "jct_p95", "ttft_p50")},
    "fidelity.live.tpot_p50_error": (0.05, "lower", "relative"),
    "fidelity.recorded.ttft_mape": (0.0199, "lower", "relative"),  # LLMServingSim's own errors on these runs
    "fidelity.recorded.tpot_mape": (0.00637, "lower", "relative"),
    "fidelity.recorded.latency_mape": (0.00989, "lower", "relative"),
    "calibrate_coverage": (0.95, "higher", "share"),
    "fidelity.silicon.family_out.ttft_median_ape": (0.20, "lower", "relative"),
    "fidelity.silicon.family_out.tpot_median_ape": (0.10, "lower", "relative"),
    "fidelity.silicon.gpu_out.ttft_median_ape": (0.20, "lower", "relative"),
    "fidelity.silicon.gpu_out.tpot_median_ape": (0.10, "lower", "relative"),
    "fidelity.silicon.tables.ttft_median_ape": (0.10, "lower", "relative"),
    "fidelity.silicon.tables.tpot_median_ape": (0.05, "lower", "relative"),
    **{
        f"fidelity.argonne.{maker}.{metric}_median_ape": (aim, "lower", "relative")
        for maker in ("nvidia", "amd")
        for metric, aim in (("ttft", 0.20), ("itl", 0.10))
    },
    "profile.cv_median_error": (0.05, "lower", "relative"),
    "profile.import_h200_s": (20.0, "lower", "s"),
    "calibrate_300_s": (60.0, "lower", "s"),
}

CAMPAIGNS = ("fidelity.live", "fidelity.gpu.")
SECTIONS = Sections("fidelity", __doc__, MODULES, TARGETS, CAMPAIGNS, making)

if __name__ == "__main__":
    SECTIONS.main()
