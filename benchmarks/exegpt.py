"""ExeGPT's evaluation: the best schedule under a latency bound, FasterTransformer and today's engines.

Sections ``real`` and ``fits`` read the folder ``shared``; ``live`` needs ``make engine`` and an otherwise idle
machine; each ``systems.MODEL`` takes minutes, and ``gain_over`` combines what is saved of them.
"""

from _sections import Sections

SYSTEMS = ("opt-13b-a40", "t5-11b-a40", "gpt-3-39b-a40", "gpt-3-101b-a100", "gpt-3-175b-a100")
CHECKS = ("monotone", "search", "regret", "variance", "engine", "bounds")
LENGTHS = ("fits", "correlated", "memory")
MODULES = {
    **{section: f"_exegpt:{section}" for section in ("choices", "figures", "literal", "reasons", "real", "drift")},
    **{section: f"_exegpt_checks:{section}" for section in CHECKS},
    **{section: f"_exegpt_lengths:{section}" for section in LENGTHS},
    "live": "_exegpt_live",
    **{f"systems.{model}": f"_exegpt:systems:{model}" for model in SYSTEMS},
    "gain_over": "_exegpt:gains_over",
}
SECTIONS = Sections("exegpt", __doc__, MODULES)

if __name__ == "__main__":
    SECTIONS.main()
