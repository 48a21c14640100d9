"""Bins whose boundaries a workload itself gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise import policy, theory
from lengthwise.scenario._workloads import per_seed
from lengthwise.scenario.scenario import Scenario
from lengthwise.schema.errors import PolicyError, UnknownNameError

Floats = npt.NDArray[np.float64]

MOST_BINS = 1024
_OTHER_SEED = 2**62
"""Added to the run's seed: the boundaries come from other requests than those that are simulated."""


def _equal_mass(lengths: Floats, k: int, batch: int) -> Floats:  # noqa: ARG001 - one contract for all rules
    """As many requests in every bin."""
    return theory.equal_mass(theory.SampledTimes(lengths), k)


def _uniform_optimal(lengths: Floats, k: int, batch: int) -> Floats:  # noqa: ARG001
    """Bins of equal width, the best where lengths are uniform (Lemma 4.1)."""
    low, high = float(lengths.min()), float(lengths.max())
    return np.zeros(0) if low == high else theory.uniform_optimal(theory.UniformTimes(low, high), k)


def _exponential(lengths: Floats, k: int, batch: int) -> Floats:
    """The recursion of Lemma A.1, for lengths that are exponential of the same mean."""
    return theory.exponential_recursion(theory.ExponentialTimes(1.0 / float(lengths.mean())), batch, k)


def _learned(lengths: Floats, k: int, batch: int) -> Floats:
    """The least expected time of a batch of ``max_num_seqs``, for lengths of any distribution."""
    return theory.learned(theory.SampledTimes(lengths), batch, k)


RULES: dict[str, Callable[[Floats, int, int], Floats]] = {
    "equal_mass": _equal_mass,
    "uniform_optimal": _uniform_optimal,
    "exponential": _exponential,
    "learned": _learned,
}
"""Ways to cut a workload's predicted lengths into ``k`` bins."""
RULE_DOCS = {
    name: f"Multi-Bin, boundaries from the workload: {(rule.__doc__ or '')}" for name, rule in RULES.items()
}
"""The rules by name, in a line each."""


def binning_of(binning: Any, scenario: Scenario) -> Any:
    """What the scheduler takes: None for "none", boundaries for a rule, anything else as it is.

    Raises:
        PolicyError: A rule's parameters are wrong, or the workload predicts nothing.
    """
    if binning == "none":
        return None
    if not isinstance(binning, str) or binning.partition("(")[0].strip() not in RULES:
        _require_known(binning)
        return binning
    name, k = _rule(binning)
    cuts = RULES[name](_lengths(binning, scenario), k, scenario.engine.max_num_seqs)
    return f"bins(boundaries={_edges(cuts)})"


def _require_known(binning: Any) -> None:
    """Raises UnknownNameError, which lists the rules too."""
    if not isinstance(binning, str):
        return
    try:
        policy.resolve("binning", binning)
    except UnknownNameError as error:
        known = [*error.known, *(f"{name}(k=8)" for name in RULES)]
        raise UnknownNameError(error.kind, error.name, known) from None


def _rule(text: str) -> tuple[str, int]:
    name, given = policy.call_of("binning", text) if "(" in text else (text, {})
    k = given.get("k")
    if set(given) != {"k"} or isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MOST_BINS:
        raise PolicyError(
            f"binning {name} takes a number of bins from 1 to {MOST_BINS}, as in {name}(k=8); got {text!r}"
        )
    return name, k


def _lengths(binning: str, scenario: Scenario) -> Floats:
    """Predicted lengths of other requests of the workload; of a replayed trace, which has no others, its own."""
    draw = per_seed(scenario.workload, scenario.folder, scenario.predictor, scenario.deployment.model)
    requests = draw(scenario.run.seed + _OTHER_SEED)
    if requests.predicted_tokens is None:
        raise PolicyError(
            f"binning {binning!r} cuts predicted output lengths, and this workload has none; give it some "
            '([predictor] kind = "oracle" predicts the truth)'
        )
    return np.maximum(requests.predicted_tokens, 1.0)


def _edges(cuts: Floats) -> list[float]:
    """Where bins begin, for cuts that are the last of each bin; whole numbers stay whole, none stands twice."""
    begins = np.where(cuts == np.floor(cuts), cuts + 1, cuts)
    return [float(f"{edge:.9g}") for edge in np.unique(begins)]
