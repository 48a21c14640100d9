"""Table 6: what is chosen for OPT-13B and task S under the paper's bounds, and what its own choices yield."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from _exegpt_scenarios import OPT, best_of_each, chosen, estimator, planner, seen

from lengthwise.schedule import Assumptions, Controls, Strategy
from lengthwise.schedule.search_space import row_of

PAPER = (  # bound, strategy, B_E, N_D, degree, latency, requests a second; how many GPUs were in groups it does not say
    (3.1, "waa", 4, 1, 2, 3.01, 22.41),
    (5.9, "waa", 10, 1, 2, 4.11, 23.76),
    (11.5, "rra", 52, 13, 4, 10.23, 25.23),
    (math.inf, "rra", 49, 7, 4, 16.87, 26.15),
)


def figures(_: Path, fast: bool) -> dict[str, Any]:
    """A row a bound; ``quick`` asks only for the first two."""
    of = estimator(OPT, "s")
    plan = planner(of)
    literal = estimator(OPT, "s", assumptions=Assumptions(paper_completions=True, encode_output_tokens=0))
    rows = {}
    for bound_s, strategy, batch, steps, tp, latency_s, rps in PAPER[: 2 if fast else None]:
        choice = chosen(plan, bound_s, disaggregated=True)
        groups = range(1, OPT.gpus // tp + 1)
        theirs = [controls(name, batch, steps, tp, many) for name in strategies(strategy) for many in groups]
        rows[f"exegpt.table6.{'none' if math.isinf(bound_s) else f'{bound_s:g}s'}"] = {
            "value": choice.row.throughput_rps,
            "unit": "requests/s",
            "bound_s": bound_s,
            "choice": seen(choice.row),
            "strategies": {name: seen(row) for name, row in best_of_each(choice).items()},
            "paper": {"words": words(strategy, batch, steps, tp), "latency_s": latency_s, "rps": rps},
            "their_schedule": best(of, theirs),
            "their_schedule_as_they_count": best(literal, theirs),
        }
    rates = [row["value"] for row in rows.values()]
    assert rates == sorted(rates), "a looser bound never serves less"
    return rows | {"exegpt.table6.kept_at_tightest": {"value": rates[0] / rates[-1], "unit": "share"}}


def strategies(name: str) -> tuple[Strategy, ...]:
    """What "WAA" may be: either split."""
    return (Strategy.RRA,) if name == "rra" else (Strategy.WAA_C, Strategy.WAA_M)


def controls(strategy: Strategy, batch: int, steps: int, tp: int, groups: int) -> Controls:
    return Controls(strategy, batch, steps, tp=tp, tp_groups=groups)


def best(of, some: list[Controls]) -> dict[str, object] | None:
    """The schedule of the highest throughput that memory holds."""
    got = of.estimate(some)
    if not got.feasible.any():
        return None
    at = int(np.argmax(got.throughput_rps))
    return seen(row_of(some[at], got, at))


def words(strategy: str, batch: int, steps: int, tp: int) -> str:
    return f"{strategy.upper()}, B_E = {batch}{f', N_D = {steps}' if strategy == 'rra' else ''}, TP {tp}"
