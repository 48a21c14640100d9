"""Applications of several models: SamuLLM's studies in simulation, search time, optima, the runner, real engines."""

from itertools import product

from _sections import Sections

STUDIES = ("ensembling", "routing", "chain", "mixed")
MODULES = {
    "drain": "_apps:million",
    **{section: f"_apps:{section}" for section in ("runner", "search", "exact")},
    **{study: f"_apps:study:{study}" for study in STUDIES},
    **{section: f"_apps:{section}" for section in ("ablation", "greedy", "live")},
}

TARGETS: dict[str, tuple[float, str, str]] = {  # name: target, better, unit
    **{
        f"apps.{study}.speedup_over_{other}_{end}": (1.0, "higher", "times")
        for study, other, end in product(STUDIES, ("max", "min"), ("lowest", "highest"))
    },
    "apps.better_over_greedy": (1.0, "higher", "times"),
    "apps.better_over_greedy_lowest": (1.0, "higher", "times"),
    "apps.gap_to_exact": (0.05, "lower", "relative"),
    "apps.search_s": (2.0, "lower", "s"),
    "apps.search_mixed_s": (10.0, "lower", "s"),
    **{
        f"apps.no_preemption_{of}_{limit}": (1.0, "higher", "times")
        for of, limit in product(("over_ours", "of_greedy", "of_min"), (256, 512))
    },
    "apps.runner_overhead_ms": (2.0, "lower", "ms"),
    "apps.estimate_error_live": (0.15, "lower", "relative"),
    "apps.estimate_error_live_known": (0.15, "lower", "relative"),
    "apps.drain_1e6_peak_mib": (4096.0, "lower", "MiB"),
}

SECTIONS = Sections("apps", __doc__, MODULES, TARGETS)

if __name__ == "__main__":
    SECTIONS.main()
