"""Lengths: Multi-Bin Batching's theory and gains, predictors, schedulers that use predictions.

Sections that need recorded data look for it in the folder ``shared`` next to the checkout (or in LENGTHWISE_SHARED, or
--shared) and are skipped with a reason where it is absent.
"""

from _sections import Sections

MULTIBIN = ("saturation", "robustness", "exponential", "gsm8k", "predictor", "engine")
MODULES = {
    "multibin.theory": "_multibin:theorems",
    **{f"multibin.{section}": f"_multibin:{section}" for section in MULTIBIN},
    "predict": "_predict",
    "encoder": "_predict:encoder",
    "elis": "_elis",
    "rerank": "simulate:rerank",
}

TARGETS: dict[str, tuple[float, str, str]] = {  # name: (target, better, unit)
    "elis.gap_closed": (0.7, "higher", "of the gap"),
    "elis.p99_over_oracle": (1.05, "lower", "of the oracle's"),
    "elis.gap_closed_at_p99_115": (0.4, "higher", "of the gap"),
    "predict.tau": (0.56, "higher", "Kendall tau"),
    "predict.r2_by_window": (0.852, "higher", "R2"),
    "predict.coverage90": (0.88, "higher", "share"),
    "predict.lexical_ms": (0.1, "lower", "ms"),
    "predict.encoder_ms": (5.0, "lower", "ms"),
    "lengths.rerank_relative_speed": (1 / 3, "higher", "of FCFS"),
}

SECTIONS = Sections("lengths", __doc__, MODULES, TARGETS)

if __name__ == "__main__":
    SECTIONS.main()
