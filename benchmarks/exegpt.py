"""ExeGPT's evaluation: the best schedule under a latency bound, FasterTransformer and today's engines.

Sections ``real`` and ``fits`` read the folder ``shared``; ``live`` needs ``make engine`` and an otherwise idle
machine; each ``systems.MODEL`` takes minutes, and ``gain_over`` combines what is saved of them.
"""

from _sections import Sections

SYSTEMS = ("opt-13b-a40", "t5-11b-a40", "gpt-3-39b-a40", "gpt-3-101b-a100", "gpt-3-175b-a100")
CHECKS = ("monotone", "search", "regret", "variance", "engine", "bounds")
LENGTHS = ("fits", "correlated", "memory")
MODULES = {
    **{section: f"_exegpt:{section}" for section in ("choices", "figures", "reasons", "real", "drift")},
    **{section: f"_exegpt_checks:{section}" for section in CHECKS},
    **{section: f"_exegpt_lengths:{section}" for section in LENGTHS},
    "live": "_exegpt_live",
    **{f"systems.{model}": f"_exegpt:systems:{model}" for model in SYSTEMS},
    "gain_over": "_exegpt:gains_over",
}

TARGETS: dict[str, tuple[float, str, str]] = {  # name: target, better, unit
    "exegpt.gain_small_mid": (2.0, "higher", "times"),
    "exegpt.gain_large": (3.2, "higher", "times"),
    "exegpt.gain_large_rra": (3.2, "higher", "times"),
    "exegpt.gain_all": (2.9, "higher", "times"),
    "exegpt.gain_real": (4.4, "higher", "times"),
    "exegpt.search_s_max": (2.0, "lower", "s"),
    "exegpt.points_share_max": (0.01, "lower", "share"),
    "exegpt.regret_max": (0.02, "lower", "share"),
    "exegpt.nonmonotone_share": (0.04, "lower", "share"),  # 3 % by throughput, 4 % by latency in the paper
    "exegpt.nonmonotone_micro_batches": (0.05, "lower", "share"),
    **{f"exegpt.drift_without_bound.{strategy}": (0.2, "lower", "share") for strategy in ("rra", "waa")},
    "exegpt.estimator_error_p95": (0.05, "lower", "relative"),
}


SECTIONS = Sections("exegpt", __doc__, MODULES, TARGETS)

if __name__ == "__main__":
    SECTIONS.main()
