"""Applications of several models: SamuLLM's studies in simulation, search time, optima, the runner, real engines."""

from _sections import Sections

STUDIES = ("ensembling", "routing", "chain", "mixed")  # SamuLLM, sections 5.1 to 5.4
MODULES = {
    "drain": "_apps:million",
    **{section: f"_apps:{section}" for section in ("runner", "search", "exact")},
    **{study: f"_apps:study:{study}" for study in STUDIES},
    **{f"idle.{study}": f"_apps:idle:{study}" for study in STUDIES},
    **{section: f"_apps:{section}" for section in ("one_model", "sequential", "ablation", "greedy", "live")},
}
SECTIONS = Sections("apps", __doc__, MODULES)

if __name__ == "__main__":
    SECTIONS.main()
