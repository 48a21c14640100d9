"""What tests hold errors to, read from the tests themselves."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from _fidelity_overview import number

TESTS = Path(__file__).parents[1] / "tests"
JUDGING = TESTS / "live" / "judging.py"
TRANSFORMERS = TESTS / "live" / "test_live_transformers.py"
RETAINED = TESTS / "measure" / "test_kept_circles.py"


def tested() -> str:
    """What is tested where, with the bounds on errors."""
    of, kept = constants(JUDGING), constants(RETAINED)
    share = {name: number(value, "relative") for name, value in of.items() if isinstance(value, float)}
    return f"""\
## What is tested where

CI runs the circle with vLLM and with transformers on its own CPU. Where that machine is too busy for vLLM's circle, or its
repeats lie too far apart, bounds on errors are not judged, which the test prints; judged is always what contention cannot
move: every request answered to the token, counts of computed tokens, complete records, the order of loads. These bounds
catch what is broken, no more: an error may be {share["WITHIN"]} of the median of its load's repeats and as much again as these lie
apart, at most {share["MOST"]} ({_names(of["METRICS"])} of one load of vLLM, {_names(of["OVER_LOADS"])} over its loads;
{_names(constants(TRANSFORMERS)["JUDGED"])} of transformers); where repeats lie more than {share["TOO_NOISY"]} apart nothing is judged.

What noise cannot move is held closer: the runs of the figures above are kept, and a test calibrates and simulates them anew
without an engine. No figure may lie further than {_points(kept["FIGURE"])} from what this page says, worse or better, no median of a load further than
{_points(kept["LOAD"])}.

Importers are tested on the real files; those too large to ship are looked for beside the checkout, and where they are
absent, as in CI elsewhere, their tests are skipped with that reason.
"""


def constants(path: Path) -> dict[str, Any]:
    """Names of a file that are given plain values at its top."""
    found = {}
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:  # computed
                continue
    return found


def _points(of: float) -> str:
    return f"{100 * of:.3g} percentage point{'' if of == 0.01 else 's'}"


def _names(metrics: tuple[str, ...]) -> str:
    return ", ".join(metric.replace("_", " ").upper() for metric in metrics)
