"""Lengths: Multi-Bin Batching's theory and gains, predictors, schedulers that use predictions.

Sections that need recorded data look for it in ``shared`` next to the checkout (LENGTHWISE_SHARED, --shared), or skip.
"""

from _sections import Sections

MULTIBIN = ("shortest", "robustness", "exponential", "gsm8k", "predictor", "engine")
MODULES = {
    "multibin.theory": "_multibin:theorems",
    **{f"multibin.{section}": f"_multibin:{section}" for section in MULTIBIN},
    **{f"multibin.rates.{lengths}": f"_multibin:rates:{lengths}" for lengths in ("uniform", "exponential", "gsm8k")},
    "predict": "_predict",
    "encoder": "_predict:encoder",
    "sidecar": "_predict:sidecar",
    "encoder.elis": "_predict:elis",
    "elis": "_elis",
    **{f"elis.{section}": f"_elis:{section}" for section in ("preemption", "request_rates", "sentences")},
    "rerank": "simulate:rerank",
}
SECTIONS = Sections("lengths", __doc__, MODULES)

if __name__ == "__main__":
    SECTIONS.main()
