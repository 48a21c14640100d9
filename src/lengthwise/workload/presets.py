"""Workloads by name, from the data files beside this one."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from lengthwise.schema.errors import UnknownNameError
from lengthwise.schema.workload import Workload
from lengthwise.workload.arrivals import AllAtOnce, Arrivals, Gamma, Poisson
from lengthwise.workload.generate import Predicted, generate
from lengthwise.workload.lengths import Capped, Conditional, Joint, Lengths
from lengthwise.workload.marginals import Marginal, TruncatedNormal
from lengthwise.workload.tables import Quantiles


@dataclass(frozen=True, eq=False)
class Preset:
    """A named workload.

    Attributes:
        name: How it is asked for.
        about: What it is, in a sentence or two.
        lengths: Draws the lengths.
        arrivals: The arrivals that come with it, when no others are asked for.
        source: Where the numbers come from.
        licence: Under what terms they came.
    """

    name: str
    about: str
    lengths: Lengths
    arrivals: Arrivals
    source: str
    licence: str

    def generate(
        self,
        num_requests: int,
        arrivals: Arrivals | None = None,
        seed: int = 0,
        *,
        predicted: Predicted = "none",
    ) -> Workload:
        """A workload of this kind; see ``lengthwise.workload.generate``."""
        arrivals = self.arrivals if arrivals is None else arrivals
        return generate(num_requests, self.lengths, arrivals, seed, predicted=predicted, name=self.name)


def preset(name: str) -> Preset:
    """The preset of this name, in any case of letters.

    Raises:
        UnknownNameError: There is none; the message names the nearest.
    """
    names = _names()
    if name.lower() not in names:
        raise UnknownNameError("workload", name, names)
    return _load(name.lower())


def presets() -> Mapping[str, Preset]:
    """All presets by name, in order."""
    return MappingProxyType({name: _load(name) for name in _names()})


@lru_cache(maxsize=1)
def _names() -> tuple[str, ...]:
    folder = files("lengthwise.workload") / "data"
    return tuple(sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")))


@lru_cache(maxsize=64)
def _load(name: str) -> Preset:
    spec = tomllib.loads((files("lengthwise.workload") / "data" / f"{name}.toml").read_text("utf-8"))
    lengths: Lengths
    if "outputs" in spec:
        lengths = Conditional(_marginal(spec["prompt"]), _classes(spec["outputs"]))
    else:
        lengths = Joint(_marginal(spec["prompt"]), _marginal(spec["output"]), spec.get("correlation", 0.0))
    if "cap" in spec:
        lengths = Capped(lengths, **spec["cap"])
    arrivals = _ARRIVALS[spec["arrivals"]["kind"]](**_without_kind(spec["arrivals"]))
    return Preset(name, spec["about"], lengths, arrivals, spec["source"], spec["licence"])


def _marginal(spec: dict[str, Any]) -> Marginal:
    return _MARGINALS[spec["kind"]](**_without_kind(spec))


def _classes(spec: dict[str, Any]) -> tuple[Marginal, ...]:
    return tuple(_marginal({**spec, "tokens": tokens}) for tokens in spec["tokens"])


def _without_kind(spec: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in spec.items() if key != "kind"}


def _truncated_normal(mean: float, sd: float, high: float, *, before_cut: bool = False) -> Marginal:
    build = TruncatedNormal if before_cut else TruncatedNormal.from_moments
    return build(mean, sd, 1.0, high)


_ARRIVALS: Mapping[str, Callable[..., Arrivals]] = {
    "all_at_once": AllAtOnce,
    "gamma": Gamma,
    "poisson": Poisson,
}
_MARGINALS: Mapping[str, Callable[..., Marginal]] = {
    "mean_median_p90": Quantiles.from_mean_median_p90,
    "quantiles": Quantiles,
    "truncated_normal": _truncated_normal,
}
