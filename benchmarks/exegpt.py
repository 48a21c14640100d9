"""ExeGPT's evaluation: the best schedule under a latency bound beside FasterTransformer and today's engines.

``figures`` takes every model and task under four bounds, ``reasons`` two readings that move its gains, ``choices``
is Table 6, ``monotone`` Table 5, ``variance`` Table 7, ``drift`` Figure 11, ``real`` Figure 10 on recorded lengths (in
the folder ``shared`` beside the checkout, or LENGTHWISE_SHARED, or --shared; skipped where absent), ``search`` how long
choices take, ``regret`` what they miss, ``instances`` Bayesian search and random instances beside, ``engine`` how far
estimates are from the event engine, ``bounds`` whether what is chosen keeps its bound there, ``live`` how far from a
CPU vLLM that is held to schedules (where ``make engine`` made one; on a machine that does nothing else),
``systems.MODEL`` the other systems and ``gain_over`` the gains over them. --save keeps the rows
in results/exegpt.json, from which `make tables` renews docs/exegpt.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from _harness import Row
from _sections import Sections

MODULES = {
    "choices": "_exegpt_choices",
    "figures": "_exegpt_figures",
    "reasons": "_exegpt_reasons",
    "real": "_exegpt_real",
    "monotone": "_exegpt_monotone",
    "drift": "_exegpt_drift",
    "search": "_exegpt_search",
    "regret": "_exegpt_regret",
    "instances": "_exegpt_instances",
    "variance": "_exegpt_variance",
    "engine": "_exegpt_engine",
    "bounds": "_exegpt_bounds",
    "live": "_exegpt_live",
}

TARGETS: dict[str, tuple[float, str, str]] = {  # name: target, which way is better, unit
    "exegpt.gain_small_mid": (2.0, "higher", "times"),
    "exegpt.gain_large": (3.2, "higher", "times"),
    "exegpt.gain_all": (2.9, "higher", "times"),
    "exegpt.gain_real": (4.4, "higher", "times"),
    "exegpt.gain_over_vllm_v1": (float("nan"), "higher", "times"),
    "exegpt.search_s_max": (2.0, "lower", "s"),
    "exegpt.points_share_max": (0.01, "lower", "share"),
    "exegpt.regret_max": (0.02, "lower", "share"),
    "exegpt.nonmonotone_share": (0.04, "lower", "share"),  # 3 % by throughput, 4 % by latency in the paper
    "exegpt.estimator_error_p95": (0.05, "lower", "relative"),
}


def systems(_: Path, fast: bool) -> Mapping[str, Callable[[], list[Row]]]:
    """A section a model, and one that puts them together."""
    import _exegpt_systems

    def rows(figures: Callable[[], dict[str, Any]]) -> list[Row]:
        return [SECTIONS.row(name, value) for name, value in figures().items()]

    found = _exegpt_systems.sections(fast)
    return {name: (lambda figures=figures: rows(figures)) for name, figures in found.items()}


SECTIONS = Sections("exegpt", (__doc__ or "").splitlines()[0], MODULES, TARGETS, systems)

if __name__ == "__main__":
    sys.exit(SECTIONS.main())
