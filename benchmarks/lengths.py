"""Lengths: Multi-Bin Batching's theory and gains, predictors, schedulers that go by predictions.

Sections that need recorded data look for it in the folder ``shared`` beside the checkout (or in
LENGTHWISE_SHARED, or --shared) and say where it is absent. --save keeps the rows of the chosen sections in
results/lengths.json, beside those of others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import _multibin
from _harness import Row
from _sections import Sections

MODULES = {"predict": "_predict", "encoder": "_encoder", "elis": "_elis", "rerank": "_rerank"}

TARGETS: dict[str, tuple[float, str, str]] = {  # name: target, which way is better, unit
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


def multibin(shared: Path, fast: bool) -> Mapping[str, Callable[[], list[Row]]]:
    """Multi-Bin Batching's sections, which give rows of their own."""
    return {f"multibin.{name}": section for name, section in _multibin.sections(shared, fast=fast).items()}


SECTIONS = Sections("lengths", __doc__.splitlines()[0], MODULES, TARGETS, multibin)

if __name__ == "__main__":
    sys.exit(SECTIONS.main())
