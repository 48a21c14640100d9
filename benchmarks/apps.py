"""Applications of several models: SamuLLM's studies in simulation, search time, optima, the runner, real engines."""

from _sections import Sections

PAPER = {  # SamuLLM, sections 5.1 to 5.4: lowest and highest speedup over its heuristics
    "ensembling": (1.1, 2.4, 1.0, 1.6), "routing": (1.4, 1.8, 1.0, 1.1), "chain": (1.0, 1.3, 1.0, 1.4),
    "mixed": (1.2, 1.4, 1.2, 1.4),
}  # fmt: skip
ENDS = ("max_lowest", "max_highest", "min_lowest", "min_highest")
MODULES = {
    "drain": "_apps:million",
    **{section: f"_apps:{section}" for section in ("runner", "search", "exact")},
    **{study: f"_apps:study:{study}" for study in PAPER},
    **{section: f"_apps:{section}" for section in ("one_model", "sequential", "ablation", "greedy", "live")},
}

TARGETS: dict[str, tuple[float, str, str]] = {  # name: target, better, unit
    **{
        f"apps.{study}.speedup_over_{end}": (value, "higher", "times")
        for study, values in PAPER.items()
        for end, value in zip(ENDS, values, strict=True)
    },
    "apps.better_over_greedy": (1.0, "higher", "times"),
    "apps.better_over_greedy_lowest": (1.0, "higher", "times"),
    "apps.gap_to_exact": (0.05, "lower", "relative"),
    "apps.search_s": (2.0, "lower", "s"),
    "apps.search_mixed_s": (10.0, "lower", "s"),
    **{f"apps.no_preemption_{of}_256": (1.0, "higher", "times") for of in ("over_ours", "of_greedy", "of_min")},
    **{f"apps.no_preemption_{of}_512": (1.0, "higher", "times") for of in ("over_ours", "of_greedy", "of_min")},
    "apps.one_model_1000_speedup": (1.5, "lower", "times"),
    "apps.one_model_10000_speedup": (5.3, "lower", "times"),
    "apps.mixed.sequential_over_joint_lengthwise": (1.0, "higher", "times"),
    "apps.runner_overhead_ms": (2.0, "lower", "ms"),
    "apps.estimate_error_live": (0.15, "lower", "relative"),
    "apps.estimate_error_live_known": (0.15, "lower", "relative"),
    "apps.drain_1e6_peak_mib": (4096.0, "lower", "MiB"),
}

SECTIONS = Sections("apps", __doc__, MODULES, TARGETS)

if __name__ == "__main__":
    SECTIONS.main()
