"""ExeGPT's evaluation: the best schedule under a latency bound, FasterTransformer and today's engines.

Sections: ``figures`` (every model and task under four bounds), ``reasons`` (two readings that move the gains),
``choices`` (Table 6), ``real`` (Figure 10, recorded lengths from the folder ``shared``), ``drift`` (Figure 11),
``monotone`` (Table 5), ``search`` (time), ``regret``, ``instances`` (Bayesian search, random instances), ``variance``
(Table 7), ``engine`` (errors of estimates), ``bounds`` (choices meet their bound), ``live`` (a CPU vLLM from
``make engine``, on an otherwise idle machine), ``systems.MODEL`` and ``gain_over`` (other systems). ``make tables``
renews docs/exegpt.md from the saved rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from _harness import Row
from _sections import Sections

MODULES = {
    "choices": "_exegpt_gains:table6",
    "figures": "_exegpt_gains",
    "reasons": "_exegpt_gains:reasons",
    "real": "_exegpt_gains:real",
    "drift": "_exegpt_gains:drifts",
    "monotone": "_exegpt_search:monotonicity",
    "search": "_exegpt_search:search",
    "regret": "_exegpt_search:regret",
    "instances": "_exegpt_search:instances",
    "variance": "_exegpt_engine:variance",
    "engine": "_exegpt_engine:errors",
    "bounds": "_exegpt_engine:bounds",
    "live": "_exegpt_live",
}

TARGETS: dict[str, tuple[float, str, str]] = {  # name: target, better, unit
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


def systems(_: Path, quick: bool) -> Mapping[str, Callable[[], list[Row]]]:
    """Return a section per model of the other systems, and one of the gains over them."""
    import _exegpt_systems

    found = _exegpt_systems.sections(quick)
    return {
        name: (lambda figures=figures: [SECTIONS.row(*one) for one in figures().items()])
        for name, figures in found.items()
    }


SECTIONS = Sections("exegpt", (__doc__ or "").splitlines()[0], MODULES, TARGETS, systems)

if __name__ == "__main__":
    sys.exit(SECTIONS.main())
