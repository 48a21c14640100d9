"""Lengths: Multi-Bin Batching's theory and gains, predictors, schedulers that use predictions.

Sections that need recorded data look for it in the folder ``shared`` next to the checkout (or in LENGTHWISE_SHARED, or
--shared) and are skipped with a reason where it is absent.
"""

from _sections import Sections

MULTIBIN = ("shortest", "robustness", "exponential", "gsm8k", "predictor", "engine")
MODULES = {
    "multibin.theory": "_multibin:theorems",
    **{f"multibin.{section}": f"_multibin:{section}" for section in MULTIBIN},
    **{f"multibin.rates.{lengths}": f"_multibin:rates:{lengths}" for lengths in ("uniform", "exponential", "gsm8k")},
    "predict": "_predict",
    "encoder": "_predict:encoder",
    "elis": "_elis",
    **{f"elis.{section}": f"_elis:{section}" for section in ("preemption", "request_rates", "sentences")},
    "rerank": "simulate:rerank",
}

TARGETS: dict[str, tuple[float, str, str]] = {  # name: (target, better, unit)
    "elis.gap_closed": (0.7, "higher", "of the gap"),
    "elis.p99_over_oracle": (1.05, "lower", "of the oracle's"),
    "elis.gap_closed_at_p99_115": (0.4, "higher", "of the gap"),
    "elis.queueing": (0.9, "higher", "of the gain"),
    "elis.prediction_time": (0.01, "lower", "of JCT"),
    "elis.preemption_batch": (120, "higher", "batch size"),
    "elis.request_rate": (3.0, "lower", "1/s"),
    "elis.sentences": (1.0, "lower", "similar over unrelated"),
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
